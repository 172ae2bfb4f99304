"""The model of a step's time: cases by hand, and what holds for any times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.analysis.speedup import (
    BOUNDS,
    StageTimes,
    async_seconds,
    bubbles,
    curve,
    drain_seconds,
    limit,
    recompute_seconds,
    slack,
    speedup,
    staleness_needed,
    step_seconds,
    sync_seconds,
    terms,
)

seconds = st.floats(0, 1000, allow_nan=False)
shares = st.floats(0, 1)
bounds = st.one_of(st.none(), st.integers(0, 64))


@st.composite
def stage_times(draw: st.DrawFn) -> StageTimes:
    scoring, training, delivery = draw(seconds), draw(seconds), draw(seconds)
    return StageTimes(
        generation=draw(seconds),
        scoring=scoring,
        training=training,
        publication=draw(seconds),
        pause=draw(shares) * delivery,
        delivery=delivery,
        scoring_tail=draw(st.one_of(st.none(), shares.map(lambda share: share * scoring))),
        training_tail=draw(st.one_of(st.none(), shares.map(lambda share: share * training))),
        occupancy=draw(st.floats(0.01, 1)),
    )


def test_synchronous_step_is_the_sum_of_its_stages() -> None:
    times = StageTimes(generation=10, scoring=4, training=6, publication=1, pause=0.5, delivery=2, scoring_tail=1.5)
    assert sync_seconds(times) == 10 + 1.5 + 6 + 1 + 2


def test_training_that_is_streamed_counts_from_the_last_score_and_never_less_than_whole() -> None:
    times = StageTimes(generation=10, scoring=1, training=6, publication=1, scoring_tail=0, training_tail=2)
    assert sync_seconds(times) == 10 + 2 + 1
    assert sync_seconds(StageTimes(generation=1, scoring=1, training=6, scoring_tail=0, training_tail=2)) == 6


def test_scoring_that_outlasts_generation_and_its_tail_counts_whole() -> None:
    assert StageTimes(generation=2, scoring=9, training=1, scoring_tail=3).experience == 9


def test_asynchronous_step_is_the_slowest_stage_or_its_share_of_the_loop() -> None:
    times = StageTimes(
        generation=10, scoring=4, training=6, publication=1, pause=0.5, delivery=2, scoring_tail=1.5, occupancy=0.4
    )
    # loop 20.5; rollout 0.4 x 10 + 0.5 = 4.5; scoring 4; trainer 7; delivery 3
    assert terms(times, 1) == {"staleness": 10.25, "rollout": 4.5, "scoring": 4, "trainer": 7, "delivery": 3}
    assert [step_seconds(times, bound) for bound in (0, 1, 2, None)] == [20.5, 10.25, 7, 7]
    assert [limit(times, bound) for bound in (0, 1, 2, None)] == ["staleness", "staleness", "trainer", "trainer"]
    assert staleness_needed(times) == 2  # 20.5 / 7 = 2.93 batches on their way
    assert speedup(times, 2) == pytest.approx(20.5 / 7)


def test_contexts_that_are_read_again_cost_the_servers_time_where_requests_run_through_a_push() -> None:
    kept = recompute_seconds(64, 900, 125_000)
    assert kept == pytest.approx(0.4608)
    times = StageTimes(generation=10, scoring=1, training=2, pause=0.2, occupancy=0.5, recompute=kept)
    assert async_seconds(times) == pytest.approx(5 + 0.2 + kept)
    assert sync_seconds(times) == pytest.approx(13.2)
    assert slack(times, None) == pytest.approx(1)
    # Drained servers read nothing again; they wait for the longest of their responses instead.
    assert drain_seconds(0.2, 8.0, 0.3) == pytest.approx(5.8)
    with pytest.raises(ValueError, match="a rate is positive"):
        recompute_seconds(1, 1, 0)


def test_published_example_of_a_low_occupancy_gains_three_and_a_half_times() -> None:
    times = StageTimes(generation=2, scoring=0.5, training=1, occupancy=0.5)
    assert speedup(times, None) == 3.5


def test_two_balanced_stages_gain_two_times_with_one_step_ahead() -> None:
    times = StageTimes(generation=3, scoring=0, training=3)
    assert (staleness_needed(times), speedup(times, 1), speedup(times, None)) == (1, 2, 2)


def test_three_balanced_stages_gain_three_times_with_two_steps_ahead() -> None:
    times = StageTimes(generation=0.1, scoring=0.1, training=0.1)
    assert staleness_needed(times) == 2
    assert speedup(times, 1) == pytest.approx(2)
    assert speedup(times, 2) == pytest.approx(3)


def test_bubbles_are_the_rest_of_a_step() -> None:
    times = StageTimes(generation=6, scoring=1, training=2, publication=1)
    assert bubbles(times, 0) == pytest.approx({"rollout": 0.4, "scoring": 0.9, "trainer": 0.7})
    assert bubbles(times, None) == pytest.approx({"rollout": 0, "scoring": 1 - 1 / 6, "trainer": 0.5})


def test_slack_of_hidden_generation() -> None:
    times = StageTimes(generation=4, scoring=0, training=10, pause=1, occupancy=0.5)
    assert slack(times, None) == pytest.approx((10 - 1) / 2)
    assert slack(times, 1) == pytest.approx((2 * 10 - 10 - 1) / 4)
    assert slack(times, 0) == 1
    assert slack(StageTimes(generation=0, scoring=1, training=1), None) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": -1.0},
        {"training": math.nan},
        {"occupancy": 0.0},
        {"occupancy": 1.5},
        {"pause": 2.0, "delivery": 1.0},
        {"scoring": 1.0, "scoring_tail": 2.0},
    ],
)
def test_impossible_times_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"is|of"):
        StageTimes(**{"generation": 1.0, "scoring": 1.0, "training": 1.0, **wrong})


def test_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness is -1"):
        step_seconds(StageTimes(1, 1, 1), -1)


@given(stage_times(), bounds)
def test_asynchronous_is_never_slower_than_synchronous(times: StageTimes, bound: int | None) -> None:
    step = step_seconds(times, bound)
    assert step <= sync_seconds(times) * (1 + 1e-12)
    assert step >= async_seconds(times)
    if bound is not None:
        assert speedup(times, bound) <= (bound + 1) * (1 + 1e-12)


@given(stage_times())
def test_more_staleness_never_costs_and_beyond_what_is_needed_never_gains(times: StageTimes) -> None:
    values = list(curve(times).values())
    assert len(values) == len(BOUNDS)
    assert values == sorted(values, reverse=True)
    assert step_seconds(times, staleness_needed(times)) == pytest.approx(async_seconds(times))
    if (needed := staleness_needed(times)) > 0:
        assert step_seconds(times, needed - 1) > async_seconds(times)


def simulated(times: StageTimes, bound: int, steps: int) -> float:
    """Seconds per step of a pipeline that is played through batch by batch, each stage one batch after the other."""
    delivered = [0.0] * (bound + 1)  # batch k starts with the weights of step k - 1 - bound
    generated = scored = trained = 0.0
    ends = []
    for _ in range(steps):
        generated = max(delivered[-1 - bound], generated) + times.generation
        assert times.scoring_tail is not None
        start = generated - times.generation
        scored = max(generated + times.scoring_tail, start + times.scoring, scored + times.scoring)
        trained = max(max(scored, trained) + times.training, delivered[-1]) + times.publication
        delivered.append(trained + times.delivered)
        ends.append(delivered[-1])
    half = steps // 2
    return (ends[-1] - ends[half - 1]) / (steps - half)


@settings(max_examples=50)
@given(*[st.floats(0.1, 10)] * 5, shares, st.integers(0, 6))
def test_formula_agrees_with_a_pipeline_played_through(
    generation: float, scoring: float, training: float, publication: float, delivery: float, tail: float, bound: int
) -> None:
    times = StageTimes(generation, scoring, training, publication, 0.0, delivery, tail * scoring)
    assert simulated(times, bound, 1680) == pytest.approx(step_seconds(times, bound), rel=0.02)


@given(seconds, seconds, seconds, shares)
def test_two_stages_gain_at_most_twice_and_three_at_most_three_times(
    generation: float, scoring: float, training: float, tail: float
) -> None:
    assert speedup(StageTimes(generation, 0, training), None) <= 2 * (1 + 1e-12)
    assert speedup(StageTimes(generation, scoring, training, scoring_tail=tail * scoring), None) <= 3 * (1 + 1e-12)


@given(stage_times(), bounds)
def test_slack_stretches_generation_as_far_as_it_says(times: StageTimes, bound: int | None) -> None:
    factor = slack(times, bound)
    if factor is None:
        return
    longer = StageTimes(
        generation=factor * times.generation,
        scoring=times.scoring,
        training=times.training,
        publication=times.publication,
        pause=times.pause,
        delivery=times.delivery,
        scoring_tail=times.scoring_tail,
        training_tail=times.training_tail,
        occupancy=times.occupancy,
    )
    assert step_seconds(longer, bound) == pytest.approx(step_seconds(times, bound), rel=1e-6, abs=1e-9)


@given(stage_times(), bounds)
def test_bubbles_are_shares(times: StageTimes, bound: int | None) -> None:
    assert all(0 <= share <= 1 for share in bubbles(times, bound).values())
