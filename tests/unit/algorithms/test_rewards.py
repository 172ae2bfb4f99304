"""Reward rules and means over what is there."""

from __future__ import annotations

import math

import pytest

from nightshift.algorithms.metrics import mean_of_valid
from nightshift.algorithms.rewards import combine, overlong_penalty


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)])
def test_o21_soft_overlong(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty, abs=1e-12)
    assert overlong_penalty(length, 100, 20, factor=2.0) == pytest.approx(2 * penalty, abs=1e-12)


@pytest.mark.parametrize(("length", "penalty"), [(100, 0), (101, -1)])
def test_o21_without_a_soft_zone_there_is_a_hard_edge(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 100, 0) == penalty


@pytest.mark.parametrize(("length", "max_length", "cache"), [(-1, 100, 20), (5, 100, 101), (5, 100, -1), (5, -1, 0)])
def test_o21_impossible_lengths_are_refused(length: int, max_length: int, cache: int) -> None:
    with pytest.raises(ValueError, match="overlong_penalty"):
        overlong_penalty(length, max_length, cache)


def test_rewards_are_summed_by_weight() -> None:
    assert combine({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 2.0}) == 2.0
    assert combine({"a": 1.0, "b": -4.0}, {"a": 0.5, "b": -0.25}) == 1.5


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_missing_reward_leaves_the_sample_unscored(missing: float | None) -> None:
    assert combine({"a": 1.0, "b": missing}, {"a": 1.0, "b": 1.0}) is None
    assert combine({"a": 1.0}, {"a": 1.0, "b": 1.0}) is None


def test_a_reward_of_weight_0_is_a_metric_only() -> None:
    assert combine({"a": 1.0, "b": None}, {"a": 1.0, "b": 0.0}) == 1.0


def test_a_reward_without_a_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="b"):
        combine({"a": 1.0, "b": 1.0}, {"a": 1.0})


def test_o09_metric_values_leave_nan_out() -> None:
    assert mean_of_valid([0.5, math.nan, math.nan, 0.8]) == pytest.approx(0.65)
    assert mean_of_valid([None, 1.0]) == 1.0
    assert math.isnan(mean_of_valid([math.nan]))
