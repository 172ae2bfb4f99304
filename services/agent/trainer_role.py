"""The trainer as a role: started, watched, started again.

A trainer that ended has lost its weights since the last checkpoint; the orchestrator goes back to that one as soon as
the new trainer's address is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import RoleError, RoleTimeoutError
from services.agent.background import Background
from services.agent.parts import Trainer
from services.agent.rollout_role import Report


class TrainerRole:
    """One trainer. Its start runs beside the caller; :meth:`tick` never waits for it."""

    NAME = "trainer"

    def __init__(
        self,
        start: Callable[[], Trainer],
        report: Report,
        wake: Callable[[], None],
        start_timeout_s: float,
        policy: RestartPolicy | None = None,
    ) -> None:
        """Prepares the role.

        Args:
            start: starts a trainer and waits until it answers.
            wake: called from another thread when the outcome of a start is there.
            start_timeout_s: after which a start counts as failed.
        """
        self._start = start
        self._report = report
        self._wake = wake
        self._timeout_s = start_timeout_s
        self._policy = policy or RestartPolicy()
        self._trainer: Trainer | None = None
        self._incarnation = 0
        self._starting: Background | None = None
        self._began = self._ready_at = 0.0
        self._due: float | None = None  # when the next start is to begin
        self._dead: Trainer | None = None  # whose processes, port and memory the next start needs
        self._cause: tuple[int, str] = (0, "")  # incarnation, and why it cannot go on

    @property
    def error(self) -> BaseException | None:
        """What the start in progress raised, not dealt with yet."""
        return self._starting.error if self._starting else None

    def begin(self) -> None:
        """Starts the trainer and returns at once."""
        if self._incarnation == 0:
            self._report(self.NAME, "starting")
        self._began, self._due = time.monotonic(), None
        self._incarnation += 1
        self._starting = Background("the start of the trainer", self._clear_and_start)
        self._starting.start(self._wake)

    def wait_ready(self) -> None:
        """Waits for the first start.

        Raises:
            NightshiftError: it failed, or took too long.
        """
        if self._starting is not None:
            self._take(self._starting.wait(self._began + self._timeout_s))

    def tick(self, now: float) -> bool:
        """Looks after a start that is due or in progress; True where a new address is there.

        Raises:
            RoleError: it ended too often.
        """
        if self._starting is not None:
            if not self._starting.done:
                if now < self._began + self._timeout_s:
                    return False
                error: BaseException = RoleTimeoutError(
                    f"it was not ready {self._timeout_s:g} s after its start began", role=self.NAME
                )
            elif self._starting.error is None:
                self._take(self._starting.wait(now))
                return True
            else:
                error = self._starting.error
            self._starting = None
            self._died(str(error), 0.0, now)
        elif self._due is not None and now >= self._due:
            self.begin()
        elif self._trainer is not None and self._cause[0] == self._incarnation and self._cause[1]:
            self._dead, self._trainer = self._trainer, None
            self._died(self._cause[1], now - self._ready_at, now)
        return False

    def ask(self) -> None:
        """Asks the trainer whether it can go on, which may take long: for a thread beside that of :meth:`tick`."""
        trainer, incarnation = self._trainer, self._incarnation
        if trainer is not None:
            self._cause = (incarnation, trainer.failure())

    def entry(self) -> dict[str, Any] | None:
        """Its address, as ``services.json`` lists it; None where there is none."""
        trainer = self._trainer
        if trainer is None:
            return None
        address = {"url": trainer.url, "incarnation": str(self._incarnation)}
        # Fakes and older trainers know no critic.
        critic = getattr(trainer, "critic_url", "")
        return address | ({"critic_url": critic} if critic else {})

    def stop(self) -> None:
        """Ends the trainer."""
        if self._trainer is not None:
            self._trainer.stop()

    def _clear_and_start(self) -> Trainer:
        dead, self._dead = self._dead, None
        if dead is not None:
            dead.stop()
        return self._start()

    def _take(self, trainer: Trainer) -> None:
        now = time.monotonic()
        self._trainer, self._starting, self._ready_at = trainer, None, now
        self._report(self.NAME, "ready", seconds=now - self._began)

    def _died(self, cause: str, uptime_s: float, now: float) -> None:
        cause = cause.removeprefix("[trainer] ")
        pause = self._policy.died(uptime_s)
        if pause is None:
            raise RoleError(
                f"it ended {self._policy.limit} times within {self._policy.early_s:g} s of its start, last so: {cause}",
                role=self.NAME,
                fix="See logs/ray in the run's folder",
            )
        self._due = now + pause
        self._report(self.NAME, "restarting", detail=cause, seconds=pause)
