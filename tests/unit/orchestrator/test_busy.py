"""The busy clock, and the overlap of two roles, against counting on a grid."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from nightshift.analysis.spans import covered, within
from orchestrator.runner.busy import BusyClock

intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def cells(parts: list[tuple[int, int]]) -> set[int]:
    return {cell for start, end in parts for cell in range(start, end)}


@given(intervals, intervals)
def test_overlap_is_the_common_time(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert covered(within(first, second)) == len(cells(first) & cells(second))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=8))
def test_a_role_is_busy_from_the_first_piece_of_work_to_the_end_of_the_last(work: list[tuple[int, int]]) -> None:
    now = 0.0
    clock = BusyClock(lambda: now)
    open_until: list[tuple[int, ExitStack]] = []
    for moment in range(50):
        now = float(moment)
        for end, stack in [item for item in open_until if item[0] == moment]:
            stack.close()
            open_until.remove((end, stack))
        for start, seconds in work:
            if start == moment:
                stack = ExitStack()
                stack.enter_context(clock.work())
                open_until.append((start + seconds, stack))
    wanted = cells([(start, start + seconds) for start, seconds in work])
    assert covered(clock.intervals()) == clock.seconds == len(wanted)
    clock.forget(20.0)
    assert all(end > 20.0 for _, end in clock.intervals())
    assert covered(within(clock.intervals(), [(20.0, 50.0)])) == len({cell for cell in wanted if cell >= 20})
    assert clock.seconds == len(wanted)


def test_work_in_progress_counts() -> None:
    now = 1.0
    clock = BusyClock(lambda: now)
    with clock.work():
        now = 4.0
        assert clock.intervals() == [(1.0, 4.0)]
        assert clock.seconds == 3.0
        clock.forget(3.0)
        assert clock.intervals() == [(1.0, 4.0)]
