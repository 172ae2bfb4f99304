"""What an advantage estimator sees: a batch of samples as plain arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

#: A group whose rewards spread by less than this has no signal: what is left is rounding error.
SPREAD_FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class AdvantageBatch:
    """N samples of one batch, in batch order. T_i is the number of response tokens of sample i.

    Attributes:
        rewards: [N] float64, NaN where a sample is unscored (or has nothing that could be trained).
        group_index: [N] int, equal for the samples of one prompt; groups are numbered in the order they appear in.
        masks: N arrays [T_i], 1 where the policy sampled the token.
        token_rewards: N float64 arrays [T_i]: the score at the last sampled token, less the KL penalty of each token
            where ``algorithm.kl_in`` is "reward". All 0 for an unscored sample.
        logprobs: N float32 arrays [T_i], log-probs of the policy that sampled.
        ref_logprobs: N float32 arrays [T_i] under the reference, or None where there is none.
        values: N arrays [T_i] from the critic, or None where there is none.
        bootstraps: [N] value after the last token; 0 where the sequence ended.
        target_logprobs: N float32 arrays [T_i] under the policy that is trained, as it is before the step; None: the
            policy that sampled is taken for it.
        teacher_logprobs: N float32 arrays [T_i] under the teacher, or None where there is none.
    """

    rewards: Doubles
    group_index: NDArray[np.intp]
    masks: Sequence[NDArray[np.uint8]]
    token_rewards: Sequence[Doubles]
    logprobs: Sequence[NDArray[np.float32]]
    ref_logprobs: Sequence[NDArray[np.float32]] | None = None
    values: Sequence[NDArray[np.floating]] | None = None
    bootstraps: Doubles | None = None
    target_logprobs: Sequence[NDArray[np.float32]] | None = None
    teacher_logprobs: Sequence[NDArray[np.float32]] | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[N] whether a sample has a reward."""
        return ~np.isnan(self.rewards)

    def groups(self) -> list[NDArray[np.intp]]:
        """Batch positions of each group's samples."""
        order = np.argsort(self.group_index, kind="stable")
        starts = np.flatnonzero(np.diff(self.group_index[order])) + 1
        return list(np.split(order, starts)) if len(order) else []

    def sequence_rewards(self) -> Doubles:
        """[N] sum of a sample's token rewards: its score less its KL penalty; NaN where unscored."""
        sums = np.array([part.sum() for part in self.token_rewards], np.float64)
        return np.where(self.scored, sums, np.nan)


@dataclass(frozen=True, slots=True)
class Valued:
    """What an estimator with a critic returns: advantages, and the values that the critic is trained towards.

    Attributes:
        advantages: N arrays [T_i].
        targets: N arrays [T_i].
    """

    advantages: Sequence[Doubles]
    targets: Sequence[Doubles]

    def __len__(self) -> int:
        return len(self.advantages)


def has_spread(rewards: Doubles) -> bool:
    """Whether a group's rewards (NaN: unscored) hold anything to learn from by comparison."""
    # Plain numbers: for a handful of them numpy takes ten times as long.
    scored = [reward for reward in rewards.tolist() if not math.isnan(reward)]
    return len(scored) >= 2 and max(scored) - min(scored) >= SPREAD_FLOOR
