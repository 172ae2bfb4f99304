"""What becomes of a group's rewards and masks after the scorers have answered, and whether it is trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from nightshift.algorithms.batch import has_spread
from nightshift.algorithms.rewards import overlong_penalty
from nightshift.config import JobSpec
from nightshift.wire.errors import RoleError
from nightshift.wire.experience import Sample

Client = TypeVar("Client")
#: Name of the penalty on long answers among the parts of a reward.
OVERLONG = "overlong"


def rewards_for(
    spec: JobSpec, rewards: Sequence[tuple[str, float, Client]], data_source: str | None
) -> list[tuple[str, float, Client]]:
    """The rewards that score prompts of one data source.

    Args:
        rewards: (name, weight, client) in the order of the job file.

    Raises:
        RoleError: none does.
    """
    chosen = [
        reward
        for config, reward in zip(spec.rewards, rewards, strict=True)
        if config.data_sources is None or data_source in config.data_sources
    ]
    if not chosen:
        raise RoleError(
            f"no reward scores prompts of data_source {data_source!r}",
            role="reward",
            fix="Add it to rewards[].data_sources, or leave that key out of one reward",
        )
    return chosen


def shape(samples: Sequence[Sample], spec: JobSpec, rewarded: bool) -> None:
    """Applies the penalty on long answers and the overlong filter; gives a distillation without rewards its score.

    Args:
        samples: of one group, scored.
        rewarded: whether the job has rewards.
    """
    config, limit = spec.algorithm, spec.rollout.max_response_length
    for sample in samples:
        if not rewarded and sample.teacher_logprobs is not None:
            on = sample.loss_mask > 0
            gap = (sample.teacher_logprobs - sample.logprobs)[on]
            # Minus the reverse KL per token, as these tokens estimate it.
            sample.reward = float(gap.mean()) if len(gap) else 0.0
        if config.overlong_buffer is not None and sample.reward is not None:
            length = len(sample.response_ids)
            penalty = overlong_penalty(length, limit, config.overlong_buffer, config.overlong_penalty)
            sample.reward += penalty
            sample.reward_parts[OVERLONG] = penalty
        if config.mask_truncated and sample.truncated:
            sample.loss_mask = np.zeros_like(sample.loss_mask)


def teaches(samples: Sequence[Sample], spec: JobSpec) -> bool:
    """Whether a group is trained on: not, under ``algorithm.filter_zero_spread``, where all its rewards are equal.

    An unscored sample says nothing, nor does one without a trained token; a group of one scored sample has nothing to
    compare. The penalty on long answers is left out: a group of right answers of different length is no signal (Yu et
    al. 2025, eq. 11, takes correctness).
    """
    if not spec.algorithm.filter_zero_spread:
        return True
    rewards = [
        np.nan
        if sample.reward is None or not sample.trained_tokens
        else sample.reward - sample.reward_parts.get(OVERLONG, 0.0)
        for sample in samples
    ]
    return has_spread(np.array(rewards, np.float64))
