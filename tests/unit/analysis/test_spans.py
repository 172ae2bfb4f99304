"""Intervals, occupancy of slots, and batches from spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.analysis.batches import Batch, batches, busy, tail
from nightshift.analysis.recording import Span
from nightshift.analysis.spans import covered, occupancy, peak, touches, union, within, without

intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 10)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=20
)


def test_union_merges_what_touches() -> None:
    assert union([(3, 4), (1, 2), (2, 3), (6, 7), (5, 5)]) == [(1, 4), (6, 7)]


def test_windows_cut_intervals_and_holes_cut_windows() -> None:
    assert within([(0, 4), (3, 9)], [(1, 2), (3.5, 5)]) == [(1, 2), (3.5, 4), (3.5, 5)]
    assert without((0, 10), [(-1, 2), (4, 5)]) == [(2, 4), (5, 10)]
    assert without((0, 3), [(0, 3)]) == []
    assert touches((0, 2), [(1, 3)])
    assert not touches((0, 2), [(2, 3)])


def test_occupancy_is_the_area_over_peak_and_time() -> None:
    ran = [(0.0, 1.0), (0.0, 1.0), (0.0, 2.0), (0.0, 4.0)]  # area 8, peak 4, 4 s
    assert peak(ran) == 4
    assert occupancy(ran, 4) == 0.5
    assert occupancy([], 4) is None
    assert occupancy(ran, 0) is None


def test_a_sequence_that_starts_as_another_ends_takes_its_slot() -> None:
    assert peak([(0, 1), (1, 2)]) == 1
    assert peak([]) == 0


@given(intervals)
def test_peak_is_the_most_that_any_moment_sees(ran: list[tuple[float, float]]) -> None:
    moments = [start for start, _ in ran]
    assert peak(ran) == max((sum(start <= at < end for start, end in ran) for at in moments), default=0)
    share = occupancy(ran, peak(ran))
    assert share is None if not ran else share is not None and 0 < share <= 1


@given(intervals, st.floats(0, 30), st.floats(31, 60))
def test_a_window_is_its_covered_part_and_the_rest(ran: list[tuple[float, float]], left: float, right: float) -> None:
    inside = covered(within(ran, [(left, right)]))
    assert inside + covered(without((left, right), ran)) == pytest.approx(right - left)
    assert busy(ran, [(left, right)]) == pytest.approx(inside / (right - left))


def test_busy_without_time_is_unknown() -> None:
    assert busy([(0, 1)], []) is None


def test_batch_of_a_group_that_was_made_again_holds_its_last_attempt_alone() -> None:
    spans = {
        "group": [Span("group", "a", 0, 9, step=1), Span("group", "a", 20, 29, step=2), Span("group", "b", 0, 9)],
        "generate": [Span("generate", "a", 1, 5), Span("generate", "a", 21, 25), Span("generate", "b", 1, 5)],
        "reward": [Span("reward", "a", 25, 26.5), Span("reward", "c", 1, 2)],
    }
    assert batches(spans) == {2: Batch([(21, 25)], [(25, 26.5)])}


def test_tail_of_batches_is_measured_against_their_common_peak() -> None:
    first, second = Batch([(0, 2), (0, 4)], [(4, 5)]), Batch([(3, 5), (3, 7)])
    found = tail([first, second])
    assert found.peak == 3
    assert found.occupancy == [6 / 12, 6 / 12]
    assert found.longest == pytest.approx([4 / 3, 4 / 3])
    assert (first.window, first.tail, second.tail, Batch().window) == ((0, 4), 1, None, None)
