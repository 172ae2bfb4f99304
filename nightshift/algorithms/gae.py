"""Generalised advantage estimation (Schulman et al. 2016) over the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nightshift.algorithms.ragged import Layout, suffix_sums

Doubles = NDArray[np.float64]


def gae(
    rewards: Sequence[ArrayLike],
    values: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstraps: ArrayLike | None = None,
) -> tuple[list[Doubles], list[Doubles]]:
    """Advantages and returns of N sequences.

    delta_t = r_t + gamma V_(t+1) - V_t and A_t = delta_t + gamma lambda A_(t+1), where t + 1 is the next *sampled*
    token: masked ones (padding, tool output) give no reward, no value and no decay, whatever stands in them.

    Args:
        rewards: N arrays [T_i], reward of each token.
        values: N arrays [T_i], V of the state before each token.
        masks: N arrays [T_i], 1 where the policy sampled the token.
        bootstraps: [N] V after the last sampled token; 0 for a sequence that ended. None: all ended.

    Returns:
        Advantages and returns (A + V): N float64 arrays [T_i] each, 0 where masked.

    Raises:
        ValueError: lengths that differ.
    """
    layout = Layout.of(masks)
    last = np.zeros(len(masks)) if bootstraps is None else np.asarray(bootstraps, np.float64)
    if not len(rewards) == len(values) == len(masks) == len(last):
        raise ValueError(f"gae: {len(rewards)} rewards, {len(values)} values, {len(masks)} masks, {len(last)} ends")
    value = layout.pack(values)
    delta = layout.following(value, last)
    delta *= gamma
    delta += layout.pack(rewards)
    delta -= value
    advantages = suffix_sums(delta, gamma * gae_lambda)
    value += advantages
    return layout.unpack(advantages), layout.unpack(value)
