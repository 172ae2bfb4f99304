"""The vLLM server as a role: started, watched, started again."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any, Protocol

from nightshift.restarts import RestartPolicy
from nightshift.wire.errors import NightshiftError, RoleError
from services.agent.pulse import Pulse


class Report(Protocol):
    """Writes a role event."""

    def __call__(self, role: str, state: str, *, detail: str = "", fix: str = "", seconds: float | None = None) -> None:
        """``state``: starting, ready, restarting, failed, stopping or stopped."""


class Server(Protocol):
    """What is needed of :class:`services.rollout.launch.VllmServer`."""

    def spawn(self) -> None: ...
    def wait_ready(self, cancelled: threading.Event | None = None) -> float: ...
    def alive(self) -> bool: ...
    def answers(self) -> bool: ...
    def failure(self) -> NightshiftError: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def entry(self) -> dict[str, Any]: ...


class _State(enum.Enum):
    STARTING = enum.auto()
    READY = enum.auto()
    PAUSING = enum.auto()


class RolloutRole:
    """One server. All methods but the waiting for its first answer run in the caller's thread.

    Call :meth:`begin` and :meth:`tick` from the main thread, which the server's life hangs on.
    """

    NAME = "rollout"

    def __init__(
        self,
        server: Server,
        report: Report,
        wake: Callable[[], None],
        policy: RestartPolicy | None = None,
        *,
        stall_timeout_s: float = 120.0,
        asked: Callable[[dict[str, Any]], str | None] = lambda entry: None,
        pulse: Callable[[Callable[[], bool]], Pulse] = Pulse,
    ) -> None:
        """Prepares a role whose server has not been started.

        Args:
            wake: is called from another thread when the outcome of a start is there for :meth:`tick`.
            stall_timeout_s: without an answer of any kind to the health check, above which the server hangs.
            asked: why somebody wants another start of the server with this entry; None: nobody does.
            pulse: makes what asks the server whether it lives.
        """
        self.server = server
        self._stall_timeout_s = stall_timeout_s
        self._asked = asked
        self._make_pulse = pulse
        self._pulse: Pulse | None = None
        self._report = report
        self._wake = wake
        self._policy = policy or RestartPolicy()
        self._state = _State.STARTING
        self._since = 0.0
        self._was_ready = False
        self._outcome: float | NightshiftError | None = None
        self._cancelled = threading.Event()

    @property
    def ready(self) -> bool:
        """Whether requests may be sent."""
        return self._state is _State.READY

    @property
    def was_ready(self) -> bool:
        """Whether its first start succeeded."""
        return self._was_ready

    @property
    def failed(self) -> NightshiftError | None:
        """The failure of a start that :meth:`tick` has not dealt with yet."""
        return self._outcome if isinstance(self._outcome, NightshiftError) else None

    def begin(self, now: float) -> None:
        """Starts the server and returns at once."""
        self._state, self._since, self._outcome = _State.STARTING, now, None
        self._cancelled = threading.Event()
        if not self._was_ready:
            self._report(self.NAME, "starting")
        self.server.spawn()
        threading.Thread(target=self._wait, args=(self._cancelled,), name="rollout-start", daemon=True).start()

    def tick(self, now: float) -> bool:
        """Looks after the server; True where its address has changed.

        Raises:
            NightshiftError: the first start failed, or it ended too often.
        """
        if self._state is _State.STARTING and self._outcome is not None:
            outcome, self._outcome = self._outcome, None
            if isinstance(outcome, NightshiftError):
                self._died(outcome, 0.0, now)
                return False
            self._state, self._since, self._was_ready = _State.READY, now, True
            self._pulse = self._make_pulse(self.server.answers)
            self._pulse.start()
            return True
        if self._state is _State.READY:
            self._look(now)
        elif self._state is _State.PAUSING and now >= self._since:
            self.begin(now)
        return False

    def stop(self) -> None:
        """Ends the server, also one that is starting."""
        self._cancelled.set()
        if self._pulse is not None:
            self._pulse.stop()
        self.server.stop()

    def _wait(self, cancelled: threading.Event) -> None:
        try:
            outcome: float | NightshiftError = self.server.wait_ready(cancelled)
        except NightshiftError as error:
            outcome = error
        except Exception as error:
            outcome = RoleError(f"the start failed: {type(error).__name__}: {error}", role=self.NAME)
        if not cancelled.is_set():
            if not isinstance(outcome, NightshiftError):
                self._report(self.NAME, "ready", seconds=outcome)  # here: the main thread may be busy with other roles
            self._outcome = outcome
            self._wake()

    def _look(self, now: float) -> None:
        """Looks whether a server that was ready still works."""
        silent = self._pulse.silent_s() if self._pulse is not None else 0.0
        cause: NightshiftError | None = None
        if not self.server.alive():
            self._died(self.server.failure(), now - self._since, now)
        elif silent > self._stall_timeout_s:
            cause = self._hangs(f"its health check had no answer for {silent:.0f} s")
        elif asked := self._asked(self.server.entry()):
            cause = self._hangs(asked)
        if cause is not None:
            self.server.kill()  # it would not hear a request to end
            self._died(cause, now - self._since, now)

    def _hangs(self, why: str) -> NightshiftError:
        name = self.server.entry().get("name", self.NAME)
        return RoleError(f"vLLM server {name} hangs: {why}", role=self.NAME, fix="rollout.stall_timeout_s is the limit")

    def _died(self, cause: NightshiftError, uptime_s: float, now: float) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        self.server.stop()  # what is left of it
        if not self._was_ready:
            raise cause
        pause = self._policy.died(uptime_s)
        if pause is None:
            raise RoleError(
                f"the vLLM server ended {self._policy.limit} times within {self._policy.early_s:g} s of its start, "
                f"last so: {cause.message}",
                role=self.NAME,
                fix=cause.fix,
            )
        self._state, self._since = _State.PAUSING, now + pause
        self._report(self.NAME, "restarting", detail=cause.message, fix=cause.fix, seconds=pause)
