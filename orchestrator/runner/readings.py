"""What the exporter reads of a run at each scrape. Reads only, from another thread than the run's loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from nightshift.config import JobSpec
from nightshift.wire.version import PolicyVersion
from orchestrator.api.metrics import Reading
from orchestrator.runner.books import Books
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import GroupRunner
from orchestrator.runner.health import ServerState
from orchestrator.runner.pipeline import Pipeline
from orchestrator.runner.stepper import Stepper

_P = "nightshift_"


class RunReader:
    """Reads the state of one run.

    Dictionaries are copied before they are walked, since the run's loop goes on changing them meanwhile; single values
    may be a moment apart.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_dir: Path,
        total_steps: int,
        *,
        books: Books,
        fleet: Fleet,
        runner: GroupRunner,
        stepper: Stepper,
        pipeline: Pipeline,
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._books = books
        self._fleet = fleet
        self._runner = runner
        self._stepper = stepper
        self._pipeline = pipeline

    def __call__(self) -> Iterator[Reading]:
        """All state metrics."""
        yield from self._groups()
        yield from self._versions()
        yield from self._servers()
        for role in ("reward", "reference"):
            yield f"{_P}calls_in_flight", {"role": role}, float(self._runner.calls[role])
        for role, clock in (("trainer", self._stepper.training), ("rollout", self._runner.busy)):
            yield f"{_P}busy_seconds_total", {"role": role}, clock.seconds
        yield from disk("run", self._run_dir)
        yield from disk("weights", Path(self._spec.resources.weight_store))

    def _groups(self) -> Iterator[Reading]:
        balance = self._books.ledger.balance()
        for name, count in balance.items():
            yield f"{_P}ledger_groups", {"state": name}, float(count)
        issued = balance.pop("issued")
        yield f"{_P}ledger_imbalance_groups", {}, float(issued - sum(balance.values()))
        state = self._pipeline.state
        yield f"{_P}running_groups", {}, float(len(state.running))
        yield f"{_P}ready_groups", {}, float(len(state.ready))
        yield f"{_P}batch_groups", {}, float(self._pipeline.admission.batch)
        ledger = self._books.ledger
        room = self._pipeline.admission.headroom(ledger.accepted, ledger.running - len(state.backlog))
        yield f"{_P}admission_headroom_groups", {}, float(max(0, room))
        yield f"{_P}buffer_bytes", {}, float(state.buffered_bytes)
        yield f"{_P}buffer_limit_bytes", {}, float(self._spec.pipeline.buffer_mib * 2**20)

    def _versions(self) -> Iterator[Reading]:
        bound = self._pipeline.admission.max_staleness
        yield f"{_P}staleness_bound_versions", {}, float(-1 if bound is None else bound)
        yield f"{_P}trainer_version", {}, float(self._stepper.step)
        yield f"{_P}fleet_version", {}, float(self._stepper.server_step)
        yield f"{_P}total_steps", {}, float(self._total_steps)

    def _servers(self) -> Iterator[Reading]:
        for server in self._fleet.servers:
            name = {"server": server.name}
            yield f"{_P}server_requests", name, float(server.running)
            for state in ServerState:
                yield f"{_P}server_state", {**name, "state": str(state)}, float(server.health.state is state)
            held = server.health.version
            behind = self._stepper.server_step - PolicyVersion.parse(held).step if held else -1
            yield f"{_P}server_lag_versions", name, float(max(behind, 0) if held else -1)


def disk(name: str, folder: Path) -> Iterator[Reading]:
    """Size and free room of the file system of a folder; nothing where it cannot be asked."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return
    yield f"{_P}disk_free_bytes", {"filesystem": name}, float(found.f_bavail * found.f_frsize)
    yield f"{_P}disk_size_bytes", {"filesystem": name}, float(found.f_blocks * found.f_frsize)
