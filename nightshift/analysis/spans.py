"""Spans as intervals of time: how long a role was busy, how many sequences ran at once. Pure; all times in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

#: (start, end) in seconds.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals merged: sorted, without overlap, empty ones left out."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds that the intervals cover, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))


def within(intervals: Iterable[Interval], windows: Iterable[Interval]) -> list[Interval]:
    """The parts of the intervals that lie in one of the windows; overlapping intervals stay apart."""
    bounds = union(windows)
    rights = [right for _, right in bounds]
    parts = []
    for start, end in intervals:
        for number in range(bisect_right(rights, start), len(bounds)):
            left, right = bounds[number]
            if left >= end:
                break
            if (cut := (max(start, left), min(end, right)))[1] > cut[0]:
                parts.append(cut)
    return parts


def without(window: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """What is left of a window where the holes are taken out."""
    left, parts = window[0], []
    for start, end in union(within(holes, [window])):
        if start > left:
            parts.append((left, start))
        left = end
    return [*parts, (left, window[1])] if window[1] > left else parts


def touches(interval: Interval, others: Iterable[Interval]) -> bool:
    """Whether the interval shares time with one of the others."""
    return any(min(interval[1], end) > max(interval[0], start) for start, end in others)


def peak(intervals: Sequence[Interval]) -> int:
    """The most intervals that share a moment; one that ends as another starts does not share it."""
    if not intervals:
        return 0
    times = np.array([*(start for start, _ in intervals), *(end for _, end in intervals)], np.float64)
    change = np.repeat(np.array([1, -1]), len(intervals))
    order = np.lexsort((change, times))  # ends before starts
    return max(0, int(np.cumsum(change[order]).max()))


def occupancy(intervals: Sequence[Interval], slots: int) -> float | None:
    """``u`` = area under "sequences running" / (slots x time), 0..1; None without sequences or slots.

    Args:
        intervals: when each sequence ran.
        slots: the most that ran at once; where more batches ran, their peak rather than this batch's own.
    """
    time = covered(intervals)
    if not slots or time <= 0:
        return None
    return min(1.0, sum(end - start for start, end in intervals) / (slots * time))
