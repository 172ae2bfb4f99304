"""When a role was busy, counted while it happens. Pure, with the clock passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightshift.analysis.spans import Interval, union


class BusyClock:
    """When a role had anything to do: from the first of several pieces of work to the end of the last.

    Args:
        clock: seconds; the same clock for roles that are compared.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._running = 0
        self._since = 0.0
        self._past: list[Interval] = []

    @contextmanager
    def work(self) -> Iterator[None]:
        """Counts one piece of work while it is inside."""
        if not self._running:
            self._since = self._clock()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._past.append((self._since, self._clock()))

    def intervals(self) -> list[Interval]:
        """All busy time so far, the piece in progress included."""
        return union([*self._past, *([(self._since, self._clock())] if self._running else [])])
