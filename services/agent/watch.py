"""Looks after what runs in Ray from a thread of its own, since a question to Ray may never be answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nightshift.wire.errors import NightshiftError, RoleError
from services.agent.rollout_role import Report

States = dict[str, tuple[str, str]]
_PERIOD_S = 1.0
_SILENCE_S = 60.0
_ERRORS_S = 20.0


class RayWatch:
    """Asks for the trainer and the scorers once a second; :meth:`check` says what is wrong."""

    def __init__(
        self,
        ask_trainer: Callable[[], None],
        scorer_states: Callable[[], States],
        roles: dict[str, str],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares a watch.

        Args:
            ask_trainer: asks the trainer, and keeps what it said.
            scorer_states: Serve application -> state and cause.
            roles: Serve application -> role.
        """
        self._ask_trainer = ask_trainer
        self._scorer_states = scorer_states
        self._roles = roles
        self._report = report
        self._clock = clock
        self._seen = dict.fromkeys(roles, "ready")
        self._failure: NightshiftError | None = None
        self._answered = clock()
        self._errors_since: float | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._run, name="ray-watch", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after its present question."""
        self._stop.set()

    def check(self) -> None:
        """Raises what is wrong.

        Raises:
            RoleError: a scorer is gone, or Ray has not answered for a minute.
        """
        if self._failure is not None:
            raise self._failure
        if self._clock() - self._answered > _SILENCE_S:
            raise RoleError(
                f"Ray has not answered for {_SILENCE_S:g} s", role="agent", fix="See logs/ray in the run's folder"
            )

    def ask(self) -> None:
        """One round of questions."""
        try:
            self._ask_trainer()
            states = self._scorer_states()
        except Exception as error:  # Ray and Serve raise many types while one of their parts is being replaced
            now = self._clock()
            self._answered = now
            since = self._errors_since = self._errors_since if self._errors_since is not None else now
            if now - since > _ERRORS_S:
                text = (str(error).splitlines() or [""])[0]
                self._failure = RoleError(
                    f"Ray does not tell the state of trainer and scorers: {type(error).__name__}: {text}",
                    role="agent",
                    fix="See logs/ray in the run's folder",
                )
            return
        self._answered, self._errors_since = self._clock(), None
        for application, (state, cause) in states.items():
            self._note(application, state, cause)

    def _note(self, application: str, state: str, cause: str) -> None:
        if state == self._seen[application]:
            return
        self._seen[application] = state
        role = self._roles[application]
        if state == "failed":
            self._failure = RoleError(
                f"{application} is gone from Serve: {cause}", role=role, fix="See logs/ray in the run's folder"
            )
        else:
            self._report(role, state, detail=(cause.splitlines() or [""])[0][:300])

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.ask()
