"""Importance weights that correct for a sampler that differs from the trainer (truncated or masked).

The numerator is the trainer's log-prob under the weights the update starts from, not the one that changes during the
update: the weights are constants of the loss, and no gradient flows through them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]
Mode = Literal["truncate", "mask"]


def token_weights(
    trainer_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike, *, cap: float, mode: Mode = "truncate"
) -> Doubles:
    """min(pi_trainer / pi_sampler, cap) per token, or with mode "mask" 0 for a token above the cap.

    Args:
        trainer_logprobs: [T] log-probs under the trainer's old weights.
        sampler_logprobs: [T] log-probs of the distribution that was sampled from.
        mask: [T] 1 where the policy sampled the token.
        cap: largest weight.

    Returns:
        [T] float64, 0 where masked.
    """
    on = np.asarray(mask) > 0
    trainer, sampler = np.asarray(trainer_logprobs, np.float64), np.asarray(sampler_logprobs, np.float64)
    log_ratio = np.where(on, trainer, 0.0) - np.where(on, sampler, 0.0)
    return np.asarray(np.where(on, _limit(log_ratio, cap, mode), 0.0), np.float64)


def sequence_weight(
    trainer_logprobs: ArrayLike, sampler_logprobs: ArrayLike, mask: ArrayLike, *, cap: float, mode: Mode = "truncate"
) -> float:
    """Weight of a whole sequence: the product of its token ratios, truncated at ``cap`` or masked to 0 above it.

    1 for a sequence without unmasked tokens (the empty product).
    """
    on = np.asarray(mask) > 0
    difference = np.asarray(trainer_logprobs, np.float64)[on] - np.asarray(sampler_logprobs, np.float64)[on]
    return float(_limit(difference.sum(keepdims=True), cap, mode)[0])


def _limit(log_ratio: Doubles, cap: float, mode: Mode) -> Doubles:
    if cap <= 0:
        raise ValueError(f"importance weights: cap {cap}, expected more than 0")
    ratio = np.exp(np.minimum(log_ratio, np.log(cap) + 1.0))  # above the cap the size no longer matters
    if mode == "truncate":
        return np.asarray(np.minimum(ratio, cap), np.float64)
    if mode == "mask":
        return np.asarray(np.where(ratio <= cap, ratio, 0.0), np.float64)
    raise ValueError(f"importance weights: unknown mode {mode!r}, expected truncate or mask")
