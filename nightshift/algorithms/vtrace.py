"""V-trace (Espeholt et al. 2018): value targets and policy gradients from off-policy tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nightshift.algorithms.ragged import Layout, suffix_recursion

Doubles = NDArray[np.float64]


def vtrace(
    target_logprobs: Sequence[ArrayLike],
    behaviour_logprobs: Sequence[ArrayLike],
    rewards: Sequence[ArrayLike],
    values: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    *,
    gamma: float = 1.0,
    trace_lambda: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
    bootstraps: ArrayLike | None = None,
) -> tuple[list[Doubles], list[Doubles]]:
    """Value targets and policy-gradient advantages of N sequences (equations 1 and 4 of the paper).

    With rho_t = min(rho_max, pi/mu), c_t = lambda min(c_max, pi/mu) and delta_t = rho_t (r_t + gamma V_(t+1) - V_t):
    v_t = V_t + delta_t + gamma c_t (v_(t+1) - V_(t+1)), and the advantage is rho_t (r_t + gamma v_(t+1) - V_t).
    Masked tokens are left out as in :func:`nightshift.algorithms.gae.gae`.

    Args:
        target_logprobs: N arrays [T_i], log pi of the policy that is trained.
        behaviour_logprobs: N arrays [T_i], log mu of the policy that sampled.
        rewards: N arrays [T_i].
        values: N arrays [T_i], V of the state before each token.
        masks: N arrays [T_i], 1 where the policy sampled the token.
        bootstraps: [N] V after the last sampled token; 0 for a sequence that ended. None: all ended.

    Returns:
        Value targets v and advantages: N float64 arrays [T_i] each, 0 where masked.

    Raises:
        ValueError: lengths that differ.
    """
    layout = Layout.of(masks)
    last = np.zeros(len(masks)) if bootstraps is None else np.asarray(bootstraps, np.float64)
    if len({len(part) for part in (target_logprobs, behaviour_logprobs, rewards, values, masks, last)}) > 1:
        raise ValueError("vtrace: the inputs hold different numbers of sequences")
    # Only min(ratio, limit) is used: capping the logarithm keeps a huge ratio from overflowing.
    log_ratio = layout.pack(target_logprobs) - layout.pack(behaviour_logprobs)
    ratio = np.exp(np.minimum(log_ratio, np.log(max(rho_max, c_max)) + 1.0))
    rho, trace = np.minimum(rho_max, ratio), trace_lambda * np.minimum(c_max, ratio)
    reward, value = layout.pack(rewards), layout.pack(values)
    delta = rho * (reward + gamma * layout.following(value, last) - value)
    # Beyond a sequence's end rewards and values are 0, so that nothing flows back from there.
    target = value + suffix_recursion(delta, gamma * trace)
    advantages = rho * (reward + gamma * layout.following(target, last) - value)
    return layout.unpack(target), layout.unpack(advantages)
