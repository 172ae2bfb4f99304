"""Asks one server at intervals whether it lives, in a thread of its own: one that hangs holds up nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Seconds between two questions.
_PERIOD_S = 2.0


class Pulse:
    """Asks until it is stopped.

    Args:
        ask: asks once; whether there was an answer of any kind. Takes a few seconds at most.
        clock: seconds, of the same kind as those that :meth:`silent_s` is asked with.
    """

    def __init__(
        self, ask: Callable[[], bool], clock: Callable[[], float] = time.monotonic, period_s: float = _PERIOD_S
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._period_s = period_s
        self._answered = clock()
        self._stop = threading.Event()

    def start(self) -> None:
        """Begins to ask."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def stop(self) -> None:
        """Asks no more; a question that is open is not waited for."""
        self._stop.set()

    def silent_s(self) -> float:
        """Seconds since the last answer, or since the beginning."""
        return self._clock() - self._answered

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            if self._ask():
                self._answered = self._clock()
