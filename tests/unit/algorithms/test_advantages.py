"""From rewards to advantages, through the function that the runner calls."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms import REGISTRY, compute_advantages, loss_kl_coef, needs_whole_batch
from nightshift.algorithms.estimators import dr_grpo_advantages, grpo_advantages, rloo_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.job import GROUP_ESTIMATORS
from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.experience import FINISH_LENGTH, Sample
from tests.fixtures.samples import make_sample

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
NAN = float("nan")


def _group(rewards: list[float | None], group: str = "g0") -> list[Sample]:
    return [make_sample(f"{group}.{slot}", reward=reward) for slot, reward in enumerate(rewards)]


def _run(rewards: list[float | None], **config: object) -> list[float]:
    """Advantage of the first token of each member of one group."""
    samples = _group(rewards)
    compute_advantages(samples, AlgorithmConfig(**config))  # type: ignore[arg-type]
    for sample in samples:
        assert sample.advantages is not None
        assert sample.advantages.dtype == np.float32
        assert len(set(sample.advantages.tolist())) == 1
    return [float(sample.advantages[0]) for sample in samples if sample.advantages is not None]


def test_o07_group_advantages() -> None:
    third = pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)
    assert _run([1, 0, 0, 0]) == third
    population = pytest.approx([1.732047, -0.577349, -0.577349, -0.577349], abs=1e-6)
    assert _run([1, 0, 0, 0], std="population") == population
    assert _run([1, 0, 0, 0], estimator="dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert _run([1, 0, 0, 0], estimator="rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-6)


@DTYPES
def test_o07_kernels_in_both_precisions(dtype: type) -> None:
    rewards = np.array([1, 0, 0, 0], dtype)
    assert grpo_advantages(rewards) == pytest.approx([1.499997] + 3 * [-0.499999], abs=1e-6)
    assert grpo_advantages(rewards, std="population") == pytest.approx([1.732047] + 3 * [-0.577349], abs=1e-6)
    assert dr_grpo_advantages(rewards) == pytest.approx([0.75] + 3 * [-0.25], abs=1e-6)
    assert rloo_advantages(rewards) == pytest.approx([1] + 3 * [-1 / 3], abs=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1] * 7, [float(np.float32(0.1))] * 7, [0.1 + 0.2, 0.3, 0.3]])
def test_o07_equal_rewards_give_exactly_0(estimator: str, rewards: list[float | None]) -> None:
    assert _run(rewards, estimator=estimator) == [0.0] * len(rewards)
    report = compute_advantages(_group(rewards), AlgorithmConfig(estimator=estimator))
    assert report.zero_spread_share == 1.0
    assert report.zero_spread_groups == report.groups == 1


@DTYPES
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1] * 7])
def test_o07_equal_rewards_in_kernels(dtype: type, rewards: list[float]) -> None:
    for rule in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        assert not rule(np.array(rewards, dtype)).any()


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_o08_a_group_of_one_is_0_and_counted(estimator: str) -> None:
    assert _run([0.7], estimator=estimator) == [0.0]
    report = compute_advantages(_group([0.7]), AlgorithmConfig(estimator=estimator))
    assert report.single_groups == 1
    assert report.zero_spread_share == 0.0
    assert _run([0.7, None], estimator=estimator) == [0.0, 0.0]


def test_o08_group_estimators_are_those_that_a_job_with_one_sample_refuses() -> None:
    assert {name for name, estimator in REGISTRY.items() if estimator.compares_group} == GROUP_ESTIMATORS


@pytest.mark.parametrize("missing", [None, NAN, math.inf])
def test_o09_an_unscored_member(missing: float | None) -> None:
    expected = pytest.approx([1.154699, 0, -0.577349, -0.577349], abs=2e-6)
    assert _run([1, missing, 0, 0]) == expected
    assert _run([1, missing, 0, 0], estimator="rloo") == [1, 0, -0.5, -0.5]
    report = compute_advantages(_group([1, missing, 0, 0]), AlgorithmConfig())
    assert report.mean_reward == pytest.approx(0.333333, abs=1e-6)
    assert (report.valid, report.samples, report.unscored) == (3, 4, 1)
    assert report.non_finite == (missing is not None)


def test_o09_kernels_leave_nan_out() -> None:
    rewards = np.array([1, NAN, 0, 0])
    assert grpo_advantages(rewards) == pytest.approx([1.154699, 0, -0.577349, -0.577349], abs=2e-6)
    assert rloo_advantages(rewards) == pytest.approx([1, 0, -0.5, -0.5])


def _interleaved() -> list[Sample]:
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 3.0]
    return [make_sample(f"{'AB'[i % 2]}.{i // 2}", reward=reward) for i, reward in enumerate(rewards)]


def test_o10_interleaved_groups_and_two_ranks() -> None:
    samples = _interleaved()
    compute_advantages(samples, AlgorithmConfig())
    got = [float(sample.advantages[0]) for sample in samples if sample.advantages is not None]
    assert got == pytest.approx([0.577349, -0.57735, -1.154699, -0.57735, 0.577349, 1.1547], abs=2e-6)
    assert [sample.sample_id for sample in samples] == ["A.0", "B.0", "A.1", "B.1", "A.2", "B.2"]
    for half in "AB":  # whole groups on each of two ranks
        part = [sample for sample in _interleaved() if sample.group_id == half]
        compute_advantages(part, AlgorithmConfig())
        expected = [value for value, sample in zip(got, samples, strict=True) if sample.group_id == half]
        assert [float(sample.advantages[0]) for sample in part if sample.advantages is not None] == expected


def _o22_samples(scores: tuple[float | None, float | None] = (1.0, 0.0)) -> list[Sample]:
    return [
        make_sample("a.0", reward=scores[0], logprobs=[-1, -1], ref_logprobs=[-1.5, -1]),
        make_sample("b.0", reward=scores[1], logprobs=[-2, -2, -9], ref_logprobs=[-2, -1, -1], mask=[1, 1, 0]),
    ]


_O22 = {"estimator": "reinforce_plus_plus", "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}


def test_o22_reinforce_plus_plus() -> None:
    samples = _o22_samples()
    report = compute_advantages(samples, AlgorithmConfig(**_O22))  # type: ignore[arg-type]
    assert samples[0].advantages == pytest.approx([0.942088, 1.056281], abs=1e-5)
    assert samples[1].advantages == pytest.approx([-0.999185, -0.999185, 0], abs=1e-5)
    assert report.mean_kl == pytest.approx(np.mean([0.5, 0, 0, -1]))
    assert report.clamped == 0


def test_o22_returns_before_whitening() -> None:
    samples = _o22_samples()
    compute_advantages(samples, AlgorithmConfig(**_O22))  # type: ignore[arg-type]
    returns = np.array([0.95, 1.0, 0.1, 0.1])  # whitening is undone with the mean and deviation of these
    flat = np.concatenate([sample.advantages for sample in samples])[:4]  # type: ignore[misc]
    assert flat * np.sqrt(returns.var() + 1e-8) + returns.mean() == pytest.approx(returns, abs=1e-6)


def test_reinforce_plus_plus_leaves_unscored_samples_out_of_the_mean() -> None:
    with_unscored = [*_o22_samples(), make_sample("c.0", reward=None, logprobs=[-1, -1], ref_logprobs=[-1, -1])]
    alone = _o22_samples()
    compute_advantages(with_unscored, AlgorithmConfig(**_O22))  # type: ignore[arg-type]
    compute_advantages(alone, AlgorithmConfig(**_O22))  # type: ignore[arg-type]
    for one, other in zip(alone, with_unscored, strict=False):
        assert np.array_equal(one.advantages, other.advantages)
    assert not with_unscored[2].advantages.any()  # type: ignore[union-attr]


def test_the_baseline_form_takes_the_group_mean_off_each_score() -> None:
    samples = [*_group([1.0, 0.0], "a"), *_group([5.0, 4.0], "b")]
    compute_advantages(samples, AlgorithmConfig(estimator="reinforce_plus_plus_baseline"))
    got = [sample.advantages[0] for sample in samples if sample.advantages is not None]
    assert got == pytest.approx([1, -1, 1, -1], abs=1e-6)
    for sample in samples:
        assert len(set(sample.advantages.tolist())) == 1  # type: ignore[union-attr]


def test_the_baseline_is_of_the_scores_and_not_of_the_kl_penalty() -> None:
    samples = [
        make_sample("a.0", reward=1.0, logprobs=[-1, -1], ref_logprobs=[-1.5, -1]),
        make_sample("a.1", reward=0.0, logprobs=[-2, -2, -9], ref_logprobs=[-2, -1, -1], mask=[1, 1, 0]),
        make_sample("a.2", reward=None, logprobs=[-1], ref_logprobs=[-9]),
        # Whitening hides what is the same for all groups.
        make_sample("b.0", reward=1.0, logprobs=[-1], ref_logprobs=[-3]),
        make_sample("b.1", reward=0.0, logprobs=[-1], ref_logprobs=[-1]),
    ]
    compute_advantages(samples, AlgorithmConfig(**_O22 | {"estimator": "reinforce_plus_plus_baseline"}))  # type: ignore[arg-type]
    returns = np.array([0.45, 0.5, -0.4, -0.4, 0.3, -0.5])  # score - 0.5 at the end, and the penalties
    expected = (returns - returns.mean()) / np.sqrt(returns.var() + 1e-8)
    got = np.concatenate([sample.advantages for sample in samples])  # type: ignore[misc]
    assert got == pytest.approx([*expected[:4], 0, 0, *expected[4:]], abs=1e-6)


def test_gamma_discounts_the_return() -> None:
    samples = [make_sample("a.0", tokens=3, reward=1.0), make_sample("b.0", tokens=1, reward=0.0)]
    compute_advantages(samples, AlgorithmConfig(estimator="reinforce_plus_plus", gamma=0.5))
    flat = np.array([0.25, 0.5, 1.0, 0.0])
    expected = (flat - flat.mean()) / np.sqrt(flat.var() + 1e-8)
    got = np.concatenate([sample.advantages for sample in samples])  # type: ignore[misc]
    assert got == pytest.approx(expected, abs=1e-6)


def test_o02_gae_through_samples_and_a_wild_value_on_padding() -> None:
    sample = make_sample("a.0", mask=[1, 1, 1, 0], reward=1.0)
    config = AlgorithmConfig(estimator="gae", gamma=1.0, gae_lambda=0.95)
    compute_advantages([sample], config, values=[np.array([0.5, 0.4, 0.6, NAN], np.float32)])
    assert sample.advantages == pytest.approx([0.451, 0.58, 0.4, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("finish", "bootstrapping", "expected"),
    [
        ("stop", True, [-0.3406, -0.6]),
        (FINISH_LENGTH, False, [-0.3406, -0.6]),
        (FINISH_LENGTH, True, [0.365072, 0.192]),
    ],
)
def test_o04_bootstrap_follows_finish_reason_and_config(
    finish: str, bootstrapping: bool, expected: list[float]
) -> None:
    sample = make_sample("a.0", tokens=2, reward=0.0, finish_reason=finish)
    config = AlgorithmConfig(estimator="gae", gamma=0.99, gae_lambda=0.9, bootstrap_truncated=bootstrapping)
    compute_advantages([sample], config, values=[np.array([0.4, 0.6], np.float32)], bootstraps=[0.8])
    assert sample.advantages == pytest.approx(expected, abs=1e-5)


def test_gae_without_values_or_with_wrong_ones_is_refused() -> None:
    config = AlgorithmConfig(estimator="gae", bootstrap_truncated=True)
    with pytest.raises(BadInputError, match="critic"):
        compute_advantages([make_sample()], config)
    with pytest.raises(RoleError, match=r"\[critic\]"):
        compute_advantages([make_sample(tokens=3)], config, values=[np.zeros(2)])
    with pytest.raises(RoleError, match=r"\[critic\]"):
        compute_advantages([make_sample(tokens=3)], config, values=[])
    with pytest.raises(BadInputError, match="bootstrap_truncated"):
        compute_advantages([make_sample(tokens=3, finish_reason=FINISH_LENGTH)], config, values=[np.zeros(3)])


def test_o34_an_empty_or_fully_masked_response_takes_no_part() -> None:
    samples = [*_group([1.0, 0.0]), make_sample("g0.2", tokens=0, reward=1.0), make_sample("g0.3", mask=[0, 0])]
    report = compute_advantages(samples, AlgorithmConfig())
    alone = _group([1.0, 0.0])
    compute_advantages(alone, AlgorithmConfig())
    for one, other in zip(alone, samples, strict=False):
        assert np.array_equal(one.advantages, other.advantages)
    assert samples[2].advantages.shape == (0,)  # type: ignore[union-attr]
    assert list(samples[3].advantages) == [0, 0]  # type: ignore[arg-type]
    assert (report.empty, report.valid) == (2, 2)


@pytest.mark.parametrize("estimator", [name for name, e in REGISTRY.items() if not (e.needs_values or e.needs_teacher)])
def test_a_batch_without_any_signal_is_all_zeros(estimator: str) -> None:
    for samples in ([], _group([None, None]), [make_sample("g0.0", tokens=0)]):
        report = compute_advantages(samples, AlgorithmConfig(estimator=estimator))
        assert math.isnan(report.mean_reward)
        assert all(not sample.advantages.any() for sample in samples)  # type: ignore[union-attr]


def test_kl_in_the_reward_shifts_group_rewards_and_needs_a_reference() -> None:
    samples = [
        make_sample("a.0", reward=1.0, logprobs=[-1.0, -1.0], ref_logprobs=[-2.0, -2.0]),
        make_sample("a.1", reward=1.0, logprobs=[-1.0, -1.0], ref_logprobs=[-1.0, -1.0]),
    ]
    config = AlgorithmConfig(estimator="dr_grpo", kl_in="reward", kl_coef=0.5, kl_estimator="k1")
    compute_advantages(samples, config)
    assert [float(s.advantages[0]) for s in samples] == [-0.5, 0.5]  # type: ignore[index]
    assert loss_kl_coef(config) == 0.0
    assert loss_kl_coef(AlgorithmConfig(kl_coef=0.5)) == 0.5
    samples[0].ref_logprobs = None
    with pytest.raises(RoleError, match=r"\[reference\] sample a\.0"):
        compute_advantages(samples, config)


def test_whitening_may_follow_any_estimator() -> None:
    samples = [*_group([1.0, 0.0, 0.0], "a"), *_group([2.0, 0.0], "b")]
    compute_advantages(samples, AlgorithmConfig(estimator="dr_grpo", whiten_advantages=True))
    flat = np.concatenate([sample.advantages for sample in samples])  # type: ignore[misc]
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6)
    assert float(flat.var()) == pytest.approx(1, abs=1e-5)


def test_which_estimators_need_the_whole_batch() -> None:
    assert not needs_whole_batch(AlgorithmConfig())
    assert needs_whole_batch(AlgorithmConfig(whiten_advantages=True))
    assert needs_whole_batch(AlgorithmConfig(estimator="reinforce_plus_plus"))
    assert needs_whole_batch(AlgorithmConfig(estimator="some.module.function"))


_rewards = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=2, max_size=6)


@given(st.lists(_rewards, min_size=1, max_size=4), st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.randoms())
def test_order_in_the_batch_does_not_matter_and_groups_sum_to_0(
    groups: list[list[float | None]], estimator: str, shuffle: random.Random
) -> None:
    def build() -> list[Sample]:
        return [sample for index, rewards in enumerate(groups) for sample in _group(rewards, f"g{index}")]

    config = AlgorithmConfig(estimator=estimator)
    samples, shuffled = build(), build()
    shuffle.shuffle(shuffled)
    report = compute_advantages(samples, config)
    other = compute_advantages(shuffled, config)
    by_id = {sample.sample_id: sample.advantages for sample in shuffled}
    for sample in samples:
        assert sample.advantages == pytest.approx(by_id[sample.sample_id], abs=1e-6)
    for index in range(len(groups)):
        members = [sample for sample in samples if sample.group_id == f"g{index}"]
        assert sum(float(s.advantages[0]) for s in members) == pytest.approx(0, abs=1e-5)  # type: ignore[index]
    assert report.zero_spread_groups == other.zero_spread_groups
    assert report.valid == other.valid


@given(_rewards)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards: list[float | None]) -> None:
    got = _run(rewards, estimator="rloo")
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    for index, reward in enumerate(rewards):
        others = [float(rewards[i]) for i in scored if i != index]  # type: ignore[arg-type]
        expected = reward - sum(others) / len(others) if reward is not None and others else 0.0
        assert got[index] == pytest.approx(expected, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.9, 1.0]))
def test_reinforce_plus_plus_equals_a_loop_over_tokens(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    samples, returns = [], []
    for index in range(4):
        mask = [*rng.integers(0, 2, size=rng.integers(0, 6)).tolist(), 1]
        logprobs, reference = -rng.random(len(mask)), -rng.random(len(mask))
        reward = float(rng.normal())
        samples.append(
            make_sample(f"{index}.0", mask=mask, reward=reward, logprobs=logprobs, ref_logprobs=reference)  # type: ignore[arg-type]
        )
        carry, tokens = 0.0, [0.0] * len(mask)
        for token in reversed(range(len(mask))):
            if mask[token]:
                last = not any(mask[token + 1 :])
                ratio = float(samples[-1].logprobs[token]) - float(samples[-1].ref_logprobs[token])  # type: ignore[index]
                carry = -0.1 * ratio + (reward if last else 0.0) + gamma * carry
                tokens[token] = carry
        returns.append((tokens, mask))
    kept = [value for tokens, mask in returns for value, on in zip(tokens, mask, strict=True) if on]
    mean, deviation = np.mean(kept), math.sqrt(np.var(kept) + 1e-8)
    config = AlgorithmConfig(**{**_O22, "gamma": gamma})  # type: ignore[arg-type]
    compute_advantages(samples, config)
    for sample, (tokens, mask) in zip(samples, returns, strict=True):
        expected = [(value - mean) / deviation if on else 0.0 for value, on in zip(tokens, mask, strict=True)]
        assert sample.advantages == pytest.approx(expected, abs=1e-4)
