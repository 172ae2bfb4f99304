"""Batches that differ, followed around the loop: cases by hand, and what holds for any times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.analysis.sequence import bound_needed, sequence_curve, sequence_seconds
from nightshift.analysis.speedup import BOUNDS, StageTimes, step_seconds
from tests.unit.analysis.test_speedup import bounds, stage_times


def two(generation: float, training: float) -> StageTimes:
    return StageTimes(generation=generation, scoring=0, training=training)


@settings(max_examples=60, deadline=None)
@given(stage_times(), st.sampled_from(BOUNDS))
def test_equal_batches_take_what_the_model_says(times: StageTimes, bound: int | None) -> None:
    assert sequence_seconds([times], bound) == pytest.approx(step_seconds(times, bound), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(stage_times(), min_size=1, max_size=6))
def test_synchronous_steps_take_their_mean_and_asynchronous_ones_no_longer(batches: list[StageTimes]) -> None:
    mean = sum(step_seconds(times, 0) for times in batches) / len(batches)
    curve = sequence_curve(batches)
    assert curve[0] == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert curve[None] <= mean * (1 + 1e-9) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(stage_times(), min_size=1, max_size=6), bounds)
def test_no_step_is_shorter_than_the_mean_of_a_stage(batches: list[StageTimes], bound: int | None) -> None:
    means = [sum(times.training + times.publication for times in batches), sum(times.scoring for times in batches)]
    assert sequence_seconds(batches, bound) >= max(means) / len(batches) * (1 - 1e-9) - 1e-9


def test_batches_that_differ_wait_for_one_another() -> None:
    # Equal: 10 + 10 in a loop of two batches, a step of 10. Here the long stages of two batches meet every second time.
    assert sequence_seconds([two(10, 10)], 1) == 10
    batches = [two(14, 6), two(6, 14), two(14, 14), two(6, 6)]
    assert sequence_seconds(batches, 0) == 20
    assert sequence_seconds(batches, 1) > 10.5
    assert sequence_seconds(batches, 4) == pytest.approx(10, rel=0.05)


def test_bound_needed_is_the_least_above_which_little_is_gained() -> None:
    assert bound_needed([two(10, 10)]) == 1
    assert bound_needed([StageTimes(generation=10, scoring=10, training=10)]) == 2
    # A delivery that hardly counts asks for no further bound.
    assert bound_needed([StageTimes(generation=10, scoring=0, training=10, pause=0.1)]) == 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        sequence_seconds([], 1)
    with pytest.raises(ValueError, match="counts from 0"):
        sequence_seconds([two(1, 1)], -1)
