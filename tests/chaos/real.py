"""One long job on the tiny model with the real parts, of which one kind is killed again and again.

The moments are random: a pause of random length after the step that follows the kill before. The job must complete, and
its audit must balance.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from tests.chaos.victims import VICTIMS, Victim, find, kill
from tests.integration.run.jobs import Finished, Running, leftovers, write_job

#: A process is given up after its third death in a row within so many seconds of its start: that kill waits longer.
_EARLY_S, _EARLY_KILLS = 20.0, 2
_PACE = "pace"
_PACED = '''

def score(response, ground_truth):
    """The same, at the pace that a file sets: seconds per sample."""
    import time
    from pathlib import Path

    try:
        time.sleep(float(Path("PACE").read_text()))
    except (OSError, ValueError):
        pass
    return dense(response, ground_truth)
'''


@dataclass
class Kill:
    """One kill.

    Attributes:
        step: furthest step before it.
        step_s: seconds to the end of the next step.
        further_s: seconds to the end of a step that had not been made before.
    """

    victim: str
    step: int
    step_s: float
    further_s: float


@dataclass
class Outcome:
    """A job that completed."""

    victims: list[str]
    seed: int
    steps: int
    seconds: float
    kills: list[Kill] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def write_chaos_job(folder: Path, model: Path, /, *, steps: int, save_freq: int, **overrides: Any) -> Path:
    """A job of steps that take a second or less."""
    job = write_job(
        folder,
        model,
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 200} | overrides.pop("pipeline", {}),
        trainer={
            "total_steps": steps,
            "learning_rate": 1e-4,
            "micro_batch_size": 4,
            "test_freq": 0,
            "save_freq": save_freq,
        },
        checkpoint={"keep": 2},
        **overrides,
    )
    reward = folder / "reward.py"
    reward.write_text(
        reward.read_text().replace("def score(", "def dense(") + _PACED.replace("PACE", str(folder / _PACE))
    )
    return job


class Matrix:
    """Kills processes of one running job.

    Args:
        job: made by :func:`write_chaos_job`.
        steps: its steps.
        pace_s: seconds per reward while kills are to come; then the job runs to its end as fast as it can.
        within_s: longest pause before a kill, in seconds.
    """

    def __init__(
        self, job: Path, steps: int, seed: int, *, pace_s: float = 0.0, limit_s: float = 360.0, within_s: float = 5.0
    ) -> None:
        self._job, self._steps, self._seed, self._limit_s, self._within_s = job, steps, seed, limit_s, within_s
        self._dice = Random(seed)
        self._pace_s = pace_s
        self._early: Counter[str] = Counter()  # deaths of each role soon after its start, in a row
        self._recovered: dict[str, float] = {}  # when each went on after the last one
        self._kills: list[Kill] = []

    def run(self, order: Sequence[str]) -> tuple[Outcome, Finished]:
        """Kills victims in this order, and waits for the end of the job.

        Raises:
            AssertionError: the job did not complete, a kill came after its end, or the books do not balance.
        """
        began = time.monotonic()
        self._set_pace(self._pace_s)
        running = Running(self._job)
        try:
            running.wait_for("step", step=1)
            for at, name in enumerate(order):
                self._kill(running, VICTIMS[name], self._steps * (at + 1) // len(order) - 2)
            self._set_pace(0.0)
            finished = running.finish(max(30.0, self._limit_s - (time.monotonic() - began)))
        except BaseException:
            running.interrupt()
            running.interrupt()
            running.process.wait(120)
            raise
        assert finished.code == 0, finished.output[-3000:]
        assert leftovers(finished.folder.name) == []
        found = audit(load(finished.folder))
        assert found.balanced, "\n".join(f"{one.kind} {one.subject}: {one.message}" for one in found.findings)
        assert found.step == self._steps
        said = {name: value for name, value in found.as_dict().items() if name not in ("findings", "notes")}
        outcome = Outcome(sorted(set(order)), self._seed, self._steps, time.monotonic() - began, self._kills, said)
        return outcome, finished

    def _kill(self, running: Running, victim: Victim, budget: int) -> None:
        """Kills a victim after a random while, and waits until the run goes on; steps beyond ``budget`` go slowly."""
        moment = time.monotonic() + self._dice.uniform(0.0, self._within_s)
        if victim.role and self._early[victim.role] == _EARLY_KILLS:
            moment = max(moment, self._recovered[victim.role] + _EARLY_S + self._dice.uniform(1.0, 5.0))
        while time.monotonic() < moment:
            self._set_pace(self._pace_s if self._furthest(running) < budget else 5 * self._pace_s)
            time.sleep(min(0.5, max(0.0, moment - time.monotonic())))
        deadline = time.monotonic() + 240
        while not (pids := find(running.process.pid, victim)):
            assert time.monotonic() < deadline, f"no process of the run is the {victim.name}"
            time.sleep(0.2)
        furthest = self._furthest(running)
        assert furthest < self._steps, f"the job was at its end before the {victim.name} could be killed"
        uptime = time.monotonic() - self._recovered.get(victim.role, -_EARLY_S)
        self._early[victim.role] = self._early[victim.role] + 1 if uptime < _EARLY_S else 1
        began = time.time()
        assert kill(self._dice.choice(pids))
        # A step that was all but made may still end: what counts is one after the role came back.
        back = self._back_after(running, began, victim.role) if victim.role else began
        self._recovered[victim.role] = time.monotonic()
        step_s = back - began + self._step_after(running, back, 0)
        further_s = back - began + self._step_after(running, back, furthest)
        self._kills.append(Kill(victim.name, furthest, step_s, further_s))
        print(
            f"{victim.name} killed at step {furthest}: next step {step_s:.1f} s, further {further_s:.1f} s", flush=True
        )

    def _back_after(self, running: Running, moment: float, role: str) -> float:
        """When a role was ready again after a moment."""
        wanted = ("job", "running") if role == "orchestrator" else ("role", "ready")
        return self._event_after(
            running,
            lambda event: (
                (event["kind"], event.get("state")) == wanted
                and (wanted[0] == "job" or event["role"] == role)
                and event["time"] > moment
            ),
            f"the {role} ready",
        )

    def _furthest(self, running: Running) -> int:
        return max(event["step"] for event in running.events() if event["kind"] == "step")

    def _step_after(self, running: Running, moment: float, step: int) -> float:
        """Seconds from a moment to the end of a step above ``step``."""
        found = self._event_after(
            running,
            lambda event: event["kind"] == "step" and event["time"] > moment and event["step"] > step,
            f"a step above {step}",
        )
        return found - moment

    def _event_after(self, running: Running, wanted: Callable[[dict[str, Any]], bool], what: str) -> float:
        """Time of the first event that is wanted, which is waited for."""
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            for event in running.events():
                if wanted(event):
                    return float(event["time"])
            if running.process.poll() is not None:
                output, _ = running.process.communicate(timeout=60)
                raise AssertionError(f"the run ended with {running.process.returncode}: {output[-3000:]}")
            time.sleep(0.1)
        raise AssertionError(f"no {what} within 240 s of the kill; last events: {running.events()[-8:]}")

    def _set_pace(self, seconds: float) -> None:
        part = self._job.with_name("pace.tmp")
        part.write_text(str(seconds))
        part.replace(self._job.with_name(_PACE))
