"""When a checkpoint is due by the clock alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runner.save_clock import SaveClock


def test_one_is_due_so_many_minutes_after_the_last() -> None:
    clock = SaveClock(10.0, now=100.0)
    assert [clock.due(now) for now in (100.0, 699.0, 700.0, 900.0)] == [False, False, True, True]
    clock.saved(900.0, 905.0)
    assert [clock.due(now) for now in (1504.0, 1505.0)] == [False, True]


def test_without_minutes_none_is_ever_due() -> None:
    clock = SaveClock(None, now=0.0)
    clock.saved(5.0, 6.0)
    assert not clock.due(1e9)


@given(st.floats(0.01, 60), st.lists(st.floats(0.0, 600.0), min_size=1, max_size=20), st.floats(0.1, 400.0))
def test_however_slow_they_are_they_take_a_twentieth_of_the_time_at_most(
    minutes: float, costs: list[float], step: float
) -> None:
    now, spent = 0.0, 0.0
    clock = SaveClock(minutes, now)
    for cost in costs:
        while not clock.due(now):
            now += step
        clock.saved(now, now + cost)
        now, spent = now + cost, spent + cost
    while not clock.due(now):
        now += step
    assert spent <= 0.05 * now * (1 + 1e-9)
