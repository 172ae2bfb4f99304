"""Starts the roles of a run on this machine, watches them, and ends them with everything they made."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from nightshift.config.job import JobSpec
from nightshift.config.load import read_resolved
from nightshift.config.scorers import REMOTE
from nightshift.gpu import find_device
from nightshift.sleep import check_sleep
from nightshift.transfer import Transfer, check_nccl, weight_backend, weight_transfer
from nightshift.wire.diagnose import translate
from nightshift.wire.errors import BadInputError, NightshiftError, RoleError
from nightshift.wire.events import EventLog
from nightshift.wire.lease_file import read_leases
from nightshift.wire.restart_request import take_restart
from services.agent import leftovers, machine
from services.agent.background import Background
from services.agent.elsewhere import external_server, scored_elsewhere
from services.agent.parts import Cluster, Parts, WeightServer
from services.agent.remote import RemoteAgent, remote_agents
from services.agent.request_logs import RequestLogs
from services.agent.rollout_servers import RolloutServers
from services.agent.trainer_role import TrainerRole
from services.agent.watch import RayWatch
from services.rollout import keeper

_log = logging.getLogger(__name__)

#: What an agent can start.
ROLES = ("rollout", "scorers", "trainer")

_RUN_ID_VARIABLE = "NIGHTSHIFT_RUN_ID"
_POLL_S = 0.5
#: Longest time that each part of the end may take.
_TRAINER_STOP_S = 20.0
_SCORERS_STOP_S = 20.0
_RAY_STOP_S = 15.0
_ROLLOUT_STOP_S = 25.0
_REMOTE_STOP_S = 20.0
#: What a service gets beyond its own deadline before the agent gives up on it.
_MARGIN_S = 90.0


class _Interrupted(BaseException):
    """The main thread is to stop what it is at; not an Exception, so that no library swallows it."""


class Supervisor:
    """The agent of one run. :meth:`run` must be called from the main thread, and once."""

    def __init__(
        self, run_dir: Path, otlp: str | None, parts: Parts | None = None, roles: frozenset[str] = frozenset(ROLES)
    ) -> None:
        """Prepares an agent for a run's folder, whose job.yaml is resolved.

        Args:
            otlp: ``http://host:port`` of the run's OTLP/gRPC receiver.
            parts: for tests: others than the real services.
            roles: what it is to start; without those for which the job names another agent.
        """
        self._roles = roles
        self._remotes: list[RemoteAgent] = []
        self._logs: RequestLogs | None = None
        self._run_dir = run_dir
        self._run_id = run_dir.name
        self._otlp = otlp
        self._parts = parts or Parts()
        self._events = EventLog(run_dir / "events.jsonl", self._run_id)
        self._wake = threading.Event()
        self._stop_asked = False
        self._starting = False
        self._role = "job"  # what is being started: the role that an unexpected error is put down to
        self._store: Path | None = None
        self._weights: WeightServer | None = None
        self._rollout: RolloutServers | None = None
        self._external_rollout: list[dict[str, Any]] = []
        self._cluster: Cluster | None = None
        self._deployed: dict[str, Any] | None = None
        self._trainer: TrainerRole | None = None
        self._watch: RayWatch | None = None

    def run(self) -> int:
        """Starts everything, watches until told to stop, ends everything. Returns the exit code of the process."""
        began = time.monotonic()
        before = leftovers.snapshot()
        keeper.adopt_orphans()
        self._install_handlers()
        self.report("agent", "starting")
        code = 0
        try:
            with self._interruptible():
                self._start()
            self.report("agent", "ready", seconds=time.monotonic() - began)
            self._watch_over()
        except _Interrupted:
            if not self._stop_asked:  # a role failed while others were starting
                code = self._fail(self._start_failure())
        except SystemExit as ending:
            if ending.code != signal.SIGTERM:  # with this, Ray's own handler answers SIGTERM while ray.init runs
                code = self._fail(RoleError(f"a library asked for the end with {ending.code}", role=self._role))
        except Exception as error:
            code = self._fail(error)
        finally:
            self._end(before)
        self.report("agent", "stopped")
        self._events.close()
        return code

    def report(self, role: str, state: str, *, detail: str = "", fix: str = "", seconds: float | None = None) -> None:
        """Writes a role event."""
        self._events.append("role", role=role, state=state, detail=detail, fix=fix, seconds=seconds)

    # Starting ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        spec = read_resolved(self._run_dir / "job.yaml")
        here = self._roles - {role for role in ("trainer", "scorers") if getattr(spec.resources.agents, role)}
        self._role = "agent"
        self._remotes = remote_agents(
            spec, self._run_dir, self._roles - here, self._otlp, events=self._events, wake=self._outcome_is_there
        )
        for remote in self._remotes:
            remote.start()
        self._role = "job"
        device = find_device(spec.resources.device)
        gpus = machine.allot_gpus(spec, device)
        if "rollout" in here:
            check_sleep(spec, device, gpus)
            check_nccl(spec, gpus)
        cores = machine.allot_cores(spec.resources, device, machine.available_cores(), spec.rollout.servers)
        os.environ[_RUN_ID_VARIABLE] = self._run_id
        os.environ[machine.TRAINER_CORES_VARIABLE] = json.dumps(cores.trainer)
        ports = spec.resources.ports
        trainer_port = self._parts.port("trainer", ports.trainer)
        scorers_port = self._parts.port("scorers", ports.scorers)
        self._role = "trainer"
        transfer = weight_transfer(spec, device)
        store = self._make_store(spec, transfer) if "trainer" in here else Path(spec.resources.weight_store)

        self._role = RolloutServers.NAME
        if transfer == "http" and not spec.is_preference and "trainer" in here:
            self._weights = self._parts.weight_server(store, spec.resources.weight_host, ports.weights)
            self._weights.start()
        if spec.is_preference or "rollout" not in here:
            pass  # nothing is sampled, or by servers that this agent has nothing to do with
        elif spec.rollout.own_servers:
            shares = machine.split_cores(cores.rollout, spec.rollout.servers)
            chosen = gpus.servers(spec.rollout.servers) if gpus else [None] * spec.rollout.servers
            servers = [
                self._parts.server(
                    spec,
                    name=(name := f"{RolloutServers.NAME}-{at}"),
                    store=None if self._weights else store,
                    log_path=self._run_dir / "logs" / f"{name}.log",
                    device=device,
                    cores=shares[at],
                    gpu=chosen[at],
                    port=ports.rollout + at if ports.rollout else 0,
                    otlp=self._otlp,
                    weight_backend=weight_backend(transfer),
                    weights_url=self._weights.url if self._weights else None,
                    cache=store / f"cache-{name}",
                )
                for at in range(spec.rollout.servers)
            ]
            self._rollout = RolloutServers(
                servers,
                self.report,
                self._outcome_is_there,
                stall_timeout_s=spec.rollout.stall_timeout_s,
                asked=lambda entry: take_restart(self._run_dir, entry["name"], entry["incarnation"]),
            )
            self._rollout.begin(time.monotonic())
        else:
            self._external_rollout = [external_server(at, url) for at, url in enumerate(spec.rollout.urls)]
            self._logs = RequestLogs(
                self._external_rollout, self._run_dir / "logs", self._events, lambda: read_leases(self._run_dir)
            )
            self._logs.start()

        self._role = "agent"
        if "trainer" in here or ("scorers" in here and scored_elsewhere(spec) is None):
            self._cluster = self._parts.cluster(spec, self._run_dir, {}, gpus)
            self._cluster.start()
            self._install_handlers()  # Ray put its own in their place

        if "trainer" in here:
            self._trainer = TrainerRole(
                lambda: self._parts.trainer(spec, trainer_port, store, self._otlp, self._run_id, gpus),
                self.report,
                self._outcome_is_there,
                spec.trainer.start_timeout_s + _MARGIN_S,
            )
            self._trainer.begin()
        if "scorers" in here:
            self._start_scorers(spec, scorers_port)

        self._role = TrainerRole.NAME
        if self._trainer is not None:
            self._trainer.wait_ready()
        for remote in self._remotes:
            remote.wait_ready(spec.trainer.start_timeout_s + spec.scorers.start_timeout_s + _MARGIN_S)

        self._role = RolloutServers.NAME
        while self._rollout is not None:
            self._rollout.tick(time.monotonic())
            if self._rollout.ready:
                break
            self._wake.wait(_POLL_S)
            self._wake.clear()
        self._write_addresses()

    def _make_store(self, spec: JobSpec, transfer: Transfer) -> Path:
        parent = Path(spec.resources.weight_store)
        if not parent.is_dir():
            raise BadInputError(
                f"the folder {str(parent)!r} for the weight store does not exist",
                role="trainer",
                fix="Set resources.weight_store to a folder in memory",
            )
        leftovers.remove_stale(parent, "nightshift-*")
        if transfer not in ("ipc", "nccl"):
            machine.check_store_room(spec, parent)
        self._store = parent / f"nightshift-{self._run_id}"
        # A folder of this run that is there already is that of an agent that was killed: its files are of no use.
        shutil.rmtree(self._store, ignore_errors=True)
        self._store.mkdir(mode=0o700)
        leftovers.mark(self._store)
        return self._store

    def _start_scorers(self, spec: JobSpec, port: int) -> None:
        roles = [
            *(["reward"] if spec.rewards else []),
            *(["reference"] if spec.needs_reference else []),
            *(["teacher"] if spec.needs_teacher else []),
            *(["critic"] if spec.scorers.critic else []),
        ]
        self._role = "reward"
        began = time.monotonic()
        for role in roles:
            self.report(role, "starting")
        self._deployed = scored_elsewhere(spec) or self._parts.deploy(spec, port, self._otlp, self._run_id)
        for role in roles:
            self.report(role, "ready", seconds=time.monotonic() - began)

    def _applications(self) -> dict[str, str]:
        """Serve application -> role, of those that run here."""
        deployed = self._deployed or {}
        spec = read_resolved(self._run_dir / "job.yaml")
        remote = {reward.name for reward in spec.rewards if reward.type == "grpc"}
        roles = {item["application"]: "reward" for item in deployed.get("rewards", []) if item["name"] not in remote}
        model = spec.scorers.reference.model
        if deployed.get("reference") and not (model and model.startswith(REMOTE)):
            roles[deployed["reference"]["application"]] = "reference"
        if deployed.get("teacher") and not (spec.scorers.teacher and spec.scorers.teacher.model.startswith(REMOTE)):
            roles[deployed["teacher"]["application"]] = "teacher"
        if deployed.get("critic"):
            roles[deployed["critic"]["application"]] = "critic"
        return roles

    # While it runs ----------------------------------------------------------------------------------------------------

    def _watch_over(self) -> None:
        applications = self._applications()
        trainer = self._trainer
        self._watch = RayWatch(
            trainer.ask if trainer is not None else lambda: None,
            lambda: self._parts.scorer_states(applications),
            applications,
            self.report,
        )
        self._watch.start()
        while not self._stop_asked:
            self._role = RolloutServers.NAME
            if self._rollout is not None and self._rollout.tick(time.monotonic()):
                self._write_addresses()
            self._role = "agent"
            if self._cluster and (cause := self._cluster.failure()):
                raise RoleError(cause, role="agent", fix="See logs/ray in the run's folder")
            self._watch.check()
            self._role = TrainerRole.NAME
            if trainer is not None and trainer.tick(time.monotonic()):
                self._write_addresses()
            changed = [remote.changed() for remote in self._remotes]
            if any(changed):
                self._write_addresses()
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def _write_addresses(self) -> None:
        """Replaces services.json; it holds tokens, so only this user may read it."""
        deployed = self._deployed or {}
        servers = self._rollout.entries() if self._rollout else self._external_rollout
        source = {"root": str(self._store)}
        if self._weights:
            source = {"url": self._weights.url, "token": self._weights.token}
        for remote in self._remotes:
            source = remote.weights or source
        addresses: dict[str, Any] = {
            "rollout": [
                {**server, "init_info": source} if server["weight_backend"] == "safetensors" else server
                for server in servers
            ],
            "rewards": deployed.get("rewards", []),
            "reference": deployed.get("reference"),
            "teacher": deployed.get("teacher"),
            "critic": deployed.get("critic"),
            # For servers that the job is lent while it works, which are not listed here.
            "lent": {"weight_backend": "safetensors", "init_info": source},
            "trainer": self._trainer.entry() if self._trainer else None,
            "metrics": self._cluster.metrics if self._cluster else [],
            # For an agent that starts the trainer for another host.
            "weights": source if self._weights else None,
        }
        for remote in self._remotes:
            addresses |= remote.addresses
        descriptor, name = tempfile.mkstemp(prefix=".services-", dir=self._run_dir)  # mode 600
        with os.fdopen(descriptor, "w") as file:
            json.dump(addresses, file, indent=1)
        Path(name).replace(self._run_dir / "services.json")

    # The end ----------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException | None) -> int:
        error = error or RoleError("the start was interrupted", role=self._role)
        if not isinstance(error, NightshiftError):
            _log.exception("unexpected", exc_info=error)
            error = translate(error, role=self._role)
            error.fix = error.fix or "See logs/agent.log"
        _log.error("%s", error)
        self.report(error.role or self._role, "failed", detail=error.message, fix=error.fix)
        return error.exit_code

    def _start_failure(self) -> BaseException | None:
        """What went wrong in the background while the main thread starts something else."""
        if self._rollout and self._rollout.failed:
            self._role = RolloutServers.NAME
            return self._rollout.failed
        if self._trainer and self._trainer.error:
            self._role = TrainerRole.NAME
            return self._trainer.error
        return next((remote.error for remote in self._remotes if remote.error), None)

    def _end(self, before: set[leftovers.FileId]) -> None:
        """Ends all roles, those that depend on others first, each with a deadline; then removes what they left."""
        self._stop_asked = True
        self.report("agent", "stopping")
        if self._watch:
            self._watch.stop()
        (self._run_dir / "services.json").unlink(missing_ok=True)
        remotes = [Background(f"the agent {remote.url}", remote.stop) for remote in self._remotes]
        for ending in remotes:
            ending.start()
        if self._logs:
            self._logs.stop()
        rollout = None
        if self._rollout:
            rollout = Background("the vLLM servers", self._rollout.stop)
            rollout.start()
        steps: list[tuple[str, Callable[[], object], float]] = []
        ray_answers = self._cluster is not None and not self._cluster.failure()
        if self._trainer and ray_answers:
            steps.append(("the trainer", self._trainer.stop, _TRAINER_STOP_S))
        if self._deployed and ray_answers and self._applications():
            steps.append(("the scorers", self._parts.undeploy, _SCORERS_STOP_S))
        if self._cluster:
            steps.append(("Ray", self._cluster.stop, _RAY_STOP_S))
        for what, stop, seconds in steps:
            step = Background(what, stop)
            step.start()
            self._finish(step, seconds)
        if rollout:
            self._finish(rollout, _ROLLOUT_STOP_S)
        for ending in remotes:
            self._finish(ending, _REMOTE_STOP_S)
        if not keeper.end_descendants(grace=2.0):
            self._events.append("warning", role="agent", message="processes of the run could not be ended")
        if self._weights:
            self._weights.stop()
        if self._store:
            shutil.rmtree(self._store, ignore_errors=True)
        if names := leftovers.remove(before):
            _log.info("removed shared memory left behind: %s", ", ".join(names))

    def _finish(self, step: Background, seconds: float) -> None:
        try:
            step.wait(time.monotonic() + seconds)
        except Exception as error:
            _log.warning("the end of %s: %s", step.what, error)

    # Signals ----------------------------------------------------------------------------------------------------------

    def _install_handlers(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle_stop)
        signal.signal(signal.SIGUSR1, self._handle_outcome)

    def _handle_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True
        self._wake.set()
        if self._starting:
            self._starting = False
            raise _Interrupted

    def _handle_outcome(self, number: int, frame: FrameType | None) -> None:
        self._wake.set()
        if self._starting and self._start_failure():
            self._starting = False
            raise _Interrupted

    def _outcome_is_there(self) -> None:
        """From another thread: something in the background has ended; the main thread may be deep inside Ray."""
        self._wake.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Within, a signal to stop raises instead of waiting for its turn."""
        if self._stop_asked:
            raise _Interrupted
        self._starting = True
        try:
            yield
        finally:
            self._starting = False
