"""Interval arithmetic against counting on a grid."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runner.intervals import clip, intersection, length, union

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def cells(parts: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in parts for cell in range(start, end)}


@given(intervals)
def test_union_covers_the_same_time_without_overlap(parts: list[tuple[int, int]]) -> None:
    merged = union(parts)
    assert length(parts) == len(cells(parts))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(intervals, intervals)
def test_intersection_is_the_common_time(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert length(intersection(first, second)) == len(cells(first) & cells(second))


@given(intervals, st.integers(0, 40), st.integers(0, 40))
def test_clip_keeps_what_lies_inside(parts: list[tuple[int, int]], start: int, end: int) -> None:
    inside = cells(parts) & set(range(start, end))
    assert length(clip(parts, start, end)) == len(inside)
