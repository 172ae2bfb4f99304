"""The built-in advantage estimators. Each is a pure function of a batch and section ``algorithm`` of the job.

An estimator returns either one number per sample, [N], which stands for all tokens of the sample, or N arrays [T_i].
Masked tokens and unscored samples are set to 0 afterwards, whatever it returns for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nightshift.algorithms.batch import AdvantageBatch, Doubles, Valued, has_spread
from nightshift.algorithms.gae import gae
from nightshift.algorithms.ragged import Layout, suffix_sums
from nightshift.algorithms.vtrace import vtrace
from nightshift.algorithms.whiten import whiten_batch
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.errors import BadInputError


def grpo_advantages(rewards: Doubles, *, std: str = "sample", epsilon: float = 1e-6) -> Doubles:
    """(r - mean) / (std + epsilon) inside one prompt group (GRPO, Shao et al. 2024).

    Args:
        rewards: [n], NaN where unscored.
        std: "sample" divides by n - 1, "population" by n.
        epsilon: added to the standard deviation.

    Returns:
        [n] float64; exactly 0 in a group without spread, with fewer than two scored members, and where unscored.
    """
    scored, out = ~np.isnan(rewards), np.zeros(len(rewards))
    if has_spread(rewards):
        valid = rewards[scored]
        out[scored] = (valid - valid.mean()) / (valid.std(ddof=1 if std == "sample" else 0) + epsilon)
    return out


def dr_grpo_advantages(rewards: Doubles) -> Doubles:
    """r - mean inside one prompt group (Dr.GRPO, Liu et al. 2025); zeros as in :func:`grpo_advantages`."""
    scored, out = ~np.isnan(rewards), np.zeros(len(rewards))
    if has_spread(rewards):
        out[scored] = rewards[scored] - rewards[scored].mean()
    return out


def rloo_advantages(rewards: Doubles) -> Doubles:
    """r less the mean of the *other* scored members (RLOO, Ahmadian et al. 2024); zeros as above."""
    count = int((~np.isnan(rewards)).sum())
    return dr_grpo_advantages(rewards) * (count / (count - 1)) if count > 1 else np.zeros(len(rewards))


def _per_group(batch: AdvantageBatch, rule: Callable[[Doubles], Doubles]) -> Doubles:
    rewards, out = batch.sequence_rewards(), np.zeros(len(batch))
    for members in batch.groups():
        out[members] = rule(rewards[members])
    return out


def grpo(batch: AdvantageBatch, config: AlgorithmConfig) -> Doubles:
    """GRPO: [N]."""
    return _per_group(batch, lambda rewards: grpo_advantages(rewards, std=config.std, epsilon=config.epsilon))


def dr_grpo(batch: AdvantageBatch, config: AlgorithmConfig) -> Doubles:
    """Dr.GRPO: [N]."""
    return _per_group(batch, dr_grpo_advantages)


def rloo(batch: AdvantageBatch, config: AlgorithmConfig) -> Doubles:
    """RLOO: [N]."""
    return _per_group(batch, rloo_advantages)


def reinforce_plus_plus(batch: AdvantageBatch, config: AlgorithmConfig) -> list[Doubles]:
    """REINFORCE++ (Hu et al. 2025): return-to-go of each token, then one whitening over the batch's sampled tokens."""
    return _whitened_returns(batch, list(batch.token_rewards), config.gamma)


def reinforce_plus_plus_baseline(batch: AdvantageBatch, config: AlgorithmConfig) -> list[Doubles]:
    """REINFORCE++ with the group's mean score as baseline: it is taken off each score before the returns.

    The mean is of the scores alone, without the KL penalty, which stays with the tokens that earn it.
    """
    baseline = np.zeros(len(batch))
    for members in batch.groups():
        if batch.scored[members].any():
            baseline[members] = np.nanmean(batch.rewards[members])
    shifted = []
    for index, rewards in enumerate(batch.token_rewards):
        sampled = np.flatnonzero(batch.masks[index])
        part = rewards.copy()
        if batch.scored[index]:
            part[sampled[-1]] -= baseline[index]
        shifted.append(part)
    return _whitened_returns(batch, shifted, config.gamma)


def gae_estimator(batch: AdvantageBatch, config: AlgorithmConfig) -> Valued:
    """GAE from a critic's values (Schulman et al. 2016); the targets are the lambda-returns A + V.

    Raises:
        BadInputError: the batch has no values.
    """
    advantages, returns = gae(
        batch.token_rewards,
        _values(batch, "gae"),
        batch.masks,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        bootstraps=batch.bootstraps,
    )
    return Valued(advantages, returns)


def vtrace_estimator(batch: AdvantageBatch, config: AlgorithmConfig) -> Valued:
    """V-trace from a critic's values (Espeholt et al. 2018, eq. 1): its targets, and advantages that carry rho.

    Raises:
        BadInputError: the batch has no values.
    """
    targets, advantages = vtrace(
        batch.logprobs if batch.target_logprobs is None else batch.target_logprobs,
        batch.logprobs,
        batch.token_rewards,
        _values(batch, "vtrace"),
        batch.masks,
        gamma=config.gamma,
        trace_lambda=config.gae_lambda,
        rho_max=config.rho_max,
        c_max=config.c_max,
        bootstraps=batch.bootstraps,
    )
    return Valued(advantages, targets)


def distillation(batch: AdvantageBatch, config: AlgorithmConfig) -> list[Doubles]:
    """On-policy distillation: the advantage of a token is log teacher - log policy, whose mean is minus the reverse KL.

    The gradient of the reverse KL at a state is that of a policy gradient with this reward of the token alone (Gu et
    al. 2024, "MiniLLM", eq. 4 without the return of later tokens; Lu 2025, "On-policy distillation").

    Raises:
        BadInputError: the batch has no log-probs of a teacher.
    """
    if batch.teacher_logprobs is None:
        raise BadInputError(
            "algorithm.estimator 'distillation' needs the log-probs of a teacher, and the job has none",
            role="job",
            fix="Give scorers.teacher",
        )
    return [
        teacher.astype(np.float64) - policy
        for teacher, policy in zip(batch.teacher_logprobs, batch.logprobs, strict=True)
    ]


def _values(batch: AdvantageBatch, name: str) -> Sequence[NDArray[np.floating]]:
    if batch.values is None:
        raise BadInputError(
            f"algorithm.estimator {name!r} needs the values of a critic, and the job has none",
            role="job",
            fix="Give scorers.critic, or choose an estimator without a critic (grpo, rloo, reinforce_plus_plus)",
        )
    return batch.values


def _whitened_returns(batch: AdvantageBatch, token_rewards: list[Doubles], gamma: float) -> list[Doubles]:
    layout = Layout.of(batch.masks)
    returns = layout.unpack(suffix_sums(layout.pack(token_rewards), gamma))
    counted = [mask if on else np.zeros_like(mask) for mask, on in zip(batch.masks, batch.scored, strict=True)]
    return whiten_batch(returns, counted)
