"""Rewards and masks after scoring: overlong penalty and filter, rewards by source, groups without a signal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nightshift.algorithms import compute_advantages
from nightshift.config import JobSpec
from nightshift.wire.errors import RoleError
from nightshift.wire.experience import FINISH_LENGTH, Sample
from orchestrator.runner.critic import value_metrics
from orchestrator.runner.mixed import mixture
from orchestrator.runner.shaping import rewards_for, shape, teaches
from tests.fixtures.samples import make_sample


def make_spec(algorithm: dict[str, Any] | None = None, **sections: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "t",
        "model": {"path": "m"},
        "data": {"train_files": ["a.jsonl"]},
        "rewards": [{"function": "r.py:f"}],
        "rollout": {"n": 4, "max_response_length": 100},
        "algorithm": algorithm or {},
    }
    return JobSpec.model_validate(values | sections)


def group(*rewards: float | None) -> list[Sample]:
    return [make_sample(f"g0.{slot}", reward=reward) for slot, reward in enumerate(rewards)]


def test_o21_the_penalty_is_taken_off_the_reward_by_tokens_and_shown_as_a_part() -> None:
    spec = make_spec({"overlong_buffer": 20, "overlong_penalty": 2.0})
    samples = [make_sample(f"g0.{n}", tokens=n, reward=1.0, response_text="x" * 1000) for n in (80, 90, 100)]
    shape(samples, spec, rewarded=True)
    assert [sample.reward for sample in samples] == [1.0, 0.0, -1.0]
    assert [sample.reward_parts["overlong"] for sample in samples] == [0.0, -1.0, -2.0]


def test_o21_an_unscored_sample_gets_no_penalty_in_place_of_a_score() -> None:
    sample = make_sample(tokens=100, reward=None)
    shape([sample], make_spec({"overlong_buffer": 20}), rewarded=True)
    assert sample.reward is None
    assert sample.reward_parts == {}


def test_cut_responses_leave_the_loss_and_keep_their_reward_where_the_job_says_so() -> None:
    samples = [make_sample("g0.0", reward=1.0, finish_reason=FINISH_LENGTH), make_sample("g0.1", reward=0.0)]
    shape(samples, make_spec(), rewarded=True)
    assert samples[0].trained_tokens == 3
    shape(samples, make_spec({"mask_truncated": True}), rewarded=True)
    assert [sample.trained_tokens for sample in samples] == [0, 3]
    assert samples[0].reward == 1.0


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((1, 0, 0, 0), True),
        ((1, 1, 1, 1), False),
        ((0.1, 0.1, 0.1), False),
        ((1, None, 1), False),
        ((None, 1), False),
        ((None, 1, 0), True),
    ],
)
def test_groups_without_spread_are_left_out_under_dynamic_sampling(
    rewards: tuple[float | None, ...], kept: bool
) -> None:
    assert teaches(group(*rewards), make_spec())
    assert teaches(group(*rewards), make_spec({"filter_zero_spread": True})) is kept


def test_a_difference_that_only_the_overlong_penalty_makes_is_no_signal() -> None:
    spec = make_spec({"filter_zero_spread": True, "overlong_buffer": 20})
    samples = [make_sample(f"g0.{n}", tokens=n, reward=1.0) for n in (10, 90)]
    shape(samples, spec, rewarded=True)
    assert samples[0].reward != samples[1].reward
    assert not teaches(samples, spec)


def test_a_difference_to_a_response_that_is_left_out_is_no_signal() -> None:
    spec = make_spec({"filter_zero_spread": True, "mask_truncated": True})
    samples = [*group(1.0, 1.0), make_sample("g0.2", reward=0.0, finish_reason=FINISH_LENGTH)]
    shape(samples, spec, rewarded=True)
    assert not teaches(samples, spec)
    compute_advantages(samples, spec.algorithm)
    assert not any(sample.advantages.any() for sample in samples if sample.advantages is not None)


def test_rewards_by_data_source() -> None:
    configs = [
        {"function": "r.py:math", "name": "math", "data_sources": ["gsm", "math"]},
        {"function": "r.py:code", "name": "code", "data_sources": ["apps"]},
        {"function": "r.py:form", "name": "form"},
    ]
    spec = make_spec(rewards=configs)
    rewards = [("math", 1.0, 1), ("code", 1.0, 2), ("form", 0.5, 3)]
    assert [name for name, _, _ in rewards_for(spec, rewards, "gsm")] == ["math", "form"]
    assert [name for name, _, _ in rewards_for(spec, rewards, "apps")] == ["code", "form"]
    assert [name for name, _, _ in rewards_for(spec, rewards, None)] == ["form"]
    only = make_spec(rewards=configs[:2])
    with pytest.raises(RoleError, match="'poems'"):
        rewards_for(only, rewards[:2], "poems")


def test_a_distillation_without_rewards_is_scored_by_minus_the_reverse_kl() -> None:
    sample = make_sample(mask=[1, 1, 0], logprobs=[-1.0, -2.0, -9.0], reward=None)
    sample.teacher_logprobs = np.array([-0.5, -3.0, -50.0], np.float32)
    spec = make_spec(
        {"estimator": "distillation"},
        rewards=[],
        scorers={"teacher": {"model": "t"}},
        rollout={"max_response_length": 9},
    )
    shape([sample], spec, rewarded=False)
    assert sample.reward == pytest.approx((0.5 - 1.0) / 2)


def test_explained_variance_is_1_for_perfect_values_and_0_for_the_mean() -> None:
    samples = group(1.0, 0.0)
    for sample, returns in zip(samples, ([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]), strict=True):
        sample.returns = np.array(returns, np.float32)
        sample.values = sample.returns.copy()
    assert value_metrics(samples)["critic/explained_variance"] == pytest.approx(1.0)
    for sample in samples:
        sample.values = np.full(3, 4.0, np.float32)
    assert value_metrics(samples)["critic/explained_variance"] == pytest.approx(0.0)
    samples[1].loss_mask = np.zeros(3, np.uint8)
    assert value_metrics(samples)["critic/return_mean"] == pytest.approx(2.0)
    assert value_metrics(group(1.0)) == {}


@pytest.mark.parametrize(
    ("algorithm", "sections", "says"),
    [
        ({"estimator": "gae"}, {}, "scorers.critic"),
        ({"estimator": "vtrace"}, {"scorers": {"critic": {}}}, "ppo_clip_proximal"),
        ({"estimator": "distillation"}, {}, "scorers.teacher"),
        ({"overlong_buffer": 200}, {}, "overlong_buffer 200"),
        ({"filter_zero_spread": True, "estimator": "reinforce_plus_plus"}, {"rollout": {"n": 1}}, "rollout.n"),
        ({"policy_loss": "ppo_klip"}, {}, "ppo_klip"),
        ({}, {"rewards": []}, "'rewards' is missing"),
        ({"policy_loss": "dpo"}, {"scorers": {"critic": {}}}, "no use for a critic"),
    ],
)
def test_sections_that_do_not_go_together_are_refused_by_name(
    algorithm: dict[str, Any], sections: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_spec(algorithm, **sections)


def test_a_mixture_of_references_averages_probabilities_and_not_their_logarithms() -> None:
    one, other = np.log(np.array([0.5, 0.2], np.float32)), np.log(np.array([0.1, 0.8], np.float32))
    assert np.exp(mixture([one, other], [0.75, 0.25])) == pytest.approx([0.4, 0.35], abs=1e-6)
    far = mixture([np.array([-200.0], np.float32), np.array([-1.0], np.float32)], [0.5, 0.5])
    assert float(far[0]) == pytest.approx(-1.0 + np.log(0.5), abs=1e-5)
    others = [{"url": "grpc://host:1", "weight": 0.6}, {"url": "grpc://host:2", "weight": 0.5}]
    with pytest.raises(ValueError, match="less than 1"):
        make_spec({"kl_coef": 0.1}, scorers={"reference": {"mixed_with": others}})
