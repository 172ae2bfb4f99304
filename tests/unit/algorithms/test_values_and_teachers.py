"""Estimators with a critic or a teacher, through the function that the runner calls."""

from __future__ import annotations

import numpy as np
import pytest

from nightshift.algorithms import REGISTRY, check_estimator, compute_advantages
from nightshift.algorithms.gae import gae
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.config.job import VALUE_ESTIMATORS
from nightshift.wire.errors import BadInputError, RoleError
from nightshift.wire.experience import FINISH_LENGTH, Sample
from tests.fixtures.samples import make_sample

TARGET, BEHAVIOUR, VALUES = [-0.5, -1.0, -0.2], [-0.7, -0.6, -0.2], [0.3, 0.5, 0.4]


def one(**fields: object) -> list[Sample]:
    return [make_sample("g0.0", logprobs=BEHAVIOUR, reward=1.0, **fields)]  # type: ignore[arg-type]


def arrays(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def config(**keys: object) -> AlgorithmConfig:
    keys = {"gamma": 0.9, "gae_lambda": 1.0} | keys
    return AlgorithmConfig(**keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_o06_vtrace_through_samples_compares_the_trained_policy_with_the_sampler(dtype: type) -> None:
    samples = one()
    values, target = [np.array(VALUES, dtype)], [np.array(TARGET, dtype)]
    compute_advantages(samples, config(estimator="vtrace"), values=values, target_logprobs=target)
    assert samples[0].advantages == pytest.approx([0.391315, 0.268128, 0.6], abs=1e-5)
    assert samples[0].returns == pytest.approx([0.691315, 0.768128, 1], abs=1e-5)


def test_o06_vtrace_values_a_cut_response_as_if_it_went_on_where_the_job_says_so() -> None:
    samples = one(finish_reason=FINISH_LENGTH)
    more = {"values": arrays(VALUES), "target_logprobs": arrays(TARGET), "bootstraps": [0.25]}
    compute_advantages(samples, config(estimator="vtrace", bootstrap_truncated=True), **more)  # type: ignore[arg-type]
    assert samples[0].returns == pytest.approx([0.813481, 0.903868, 1.225], abs=1e-5)
    compute_advantages(samples, config(estimator="vtrace"), **more)  # type: ignore[arg-type]
    assert samples[0].returns == pytest.approx([0.691315, 0.768128, 1], abs=1e-5)


def test_o04_only_cut_responses_are_valued_beyond_their_end() -> None:
    samples = [*one(finish_reason=FINISH_LENGTH), make_sample("g0.1", logprobs=BEHAVIOUR, reward=1.0)]
    keys = config(estimator="gae", bootstrap_truncated=True)
    compute_advantages(samples, keys, values=arrays(VALUES, VALUES), bootstraps=[0.25, 0.25])
    assert float(samples[0].returns[-1]) == pytest.approx(1.0 + 0.9 * 0.25)  # type: ignore[index]
    assert float(samples[1].returns[-1]) == pytest.approx(1.0)  # type: ignore[index]


def test_vtrace_without_log_probs_of_the_trained_policy_takes_the_samplers() -> None:
    samples = one()
    compute_advantages(samples, config(estimator="vtrace"), values=arrays(VALUES))
    assert samples[0].returns == pytest.approx([0.81, 0.9, 1.0], abs=1e-6)  # on-policy: the discounted return


def test_gae_names_its_returns_and_other_estimators_get_lambda_returns() -> None:
    samples = one()
    compute_advantages(samples, config(estimator="gae", gae_lambda=0.8), values=arrays(VALUES))
    advantages, returns = gae([[0, 0, 1.0]], [VALUES], [[1, 1, 1]], gamma=0.9, gae_lambda=0.8)
    assert samples[0].advantages == pytest.approx(advantages[0], abs=1e-6)
    assert samples[0].returns == pytest.approx(returns[0], abs=1e-6)
    pair = [*one(), make_sample("g0.1", logprobs=BEHAVIOUR, reward=0.0)]
    compute_advantages(pair, config(estimator="dr_grpo", gae_lambda=0.8), values=arrays(VALUES, VALUES))
    assert pair[0].advantages == pytest.approx([0.5] * 3)
    assert pair[0].returns == pytest.approx(returns[0], abs=1e-6)


def test_whitening_moves_the_advantages_and_leaves_the_critics_targets() -> None:
    plain, white = one(), one()
    compute_advantages(plain, config(estimator="gae"), values=arrays(VALUES))
    compute_advantages(white, config(estimator="gae", whiten_advantages=True), values=arrays(VALUES))
    assert white[0].returns == pytest.approx(plain[0].returns)  # type: ignore[arg-type]
    assert float(white[0].advantages.mean()) == pytest.approx(0.0, abs=1e-6)  # type: ignore[union-attr]


def test_an_unscored_sample_teaches_the_critic_nothing() -> None:
    samples = [*one(), make_sample("g1.0", logprobs=BEHAVIOUR, reward=None)]
    compute_advantages(samples, config(estimator="gae"), values=arrays(VALUES, VALUES))
    assert not samples[1].returns.any()  # type: ignore[union-attr]
    assert not samples[1].advantages.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("estimator", sorted(VALUE_ESTIMATORS))
def test_estimators_with_values_are_those_that_the_job_file_knows(estimator: str) -> None:
    assert REGISTRY[estimator].needs_values
    assert {name for name, found in REGISTRY.items() if found.needs_values} == VALUE_ESTIMATORS
    with pytest.raises(BadInputError, match=f"{estimator!r} needs the values"):
        compute_advantages(one(), AlgorithmConfig(estimator=estimator))
    with pytest.raises(BadInputError, match=r"scorers\.critic"):
        check_estimator(estimator, has_critic=False)


def test_values_and_log_probs_of_another_length_are_refused_by_role() -> None:
    with pytest.raises(RoleError, match=r"\[critic\] values of sample g0\.0"):
        compute_advantages(one(), config(estimator="gae"), values=arrays([1.0]))
    with pytest.raises(RoleError, match=r"\[trainer\] target log-probs of sample g0\.0"):
        compute_advantages(one(), config(estimator="vtrace"), values=arrays(VALUES), target_logprobs=arrays([1.0, 2.0]))


def test_distillation_is_the_gap_to_the_teacher_at_sampled_tokens() -> None:
    samples = [make_sample("g0.0", logprobs=[-1.0, -2.0, -3.0], mask=[1, 0, 1], reward=0.0)]
    samples[0].teacher_logprobs = np.array([-0.5, -9.0, -3.5], np.float32)
    compute_advantages(samples, AlgorithmConfig(estimator="distillation"))
    assert samples[0].advantages == pytest.approx([0.5, 0.0, -0.5])
    with pytest.raises(BadInputError, match=r"scorers\.teacher"):
        compute_advantages(one(), AlgorithmConfig(estimator="distillation"))
    with pytest.raises(BadInputError, match=r"scorers\.teacher"):
        check_estimator("distillation", has_teacher=False)


def test_o01_straight_through_estimators_have_their_value_in_the_reward() -> None:
    found = []
    for kind in ("k3", "k3_st"):
        samples = [make_sample("g0.0", logprobs=[-1.0, -2.0], ref_logprobs=[-1.2, -1.5], reward=1.0)]
        keys = {"estimator": "reinforce_plus_plus", "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": kind}
        found.append(compute_advantages(samples, config(**keys)).mean_kl)
    assert found[0] == found[1] == pytest.approx((0.0187308 + 0.1487213) / 2, abs=1e-6)
