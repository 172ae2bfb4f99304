"""When a role was busy, counted while it happens. Pure, with the clock passed in."""

from __future__ import annotations

import time
from collections import deque
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
        self._past: deque[Interval] = deque()
        self._total = 0.0

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
                self._end(self._since, self._clock())

    @property
    def seconds(self) -> float:
        """Busy time so far, the piece in progress and what was forgotten included."""
        return self._total + (max(0.0, self._clock() - self._since) if self._running else 0.0)

    def intervals(self) -> list[Interval]:
        """Busy time since :meth:`forget`, the piece in progress included: in order, without overlap."""
        return union([*self._past, *([(self._since, self._clock())] if self._running else [])])

    def forget(self, before: float) -> None:
        """Lets go of the intervals that ended before a moment; a long run would pile them up."""
        while self._past and self._past[0][1] <= before:
            self._past.popleft()

    def _end(self, start: float, end: float) -> None:
        self._past.append((start, end))
        self._total += max(0.0, end - start)
