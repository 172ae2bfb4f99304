"""Time in intervals: busy shares and the overlap of two roles. Pure, with the clock passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

#: (start, end) in seconds.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals merged: sorted and without overlap."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that the intervals cover, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The parts of the intervals that lie within [start, end]."""
    return [(max(start, a), min(end, b)) for a, b in intervals if b > start and a < end]


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The time in which both are busy."""
    a, b = union(first), union(second)
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


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
