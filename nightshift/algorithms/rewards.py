"""Rewards of one sample: the soft penalty on long answers, and the weighted sum of several rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping


def overlong_penalty(length: int, max_length: int, cache: int, factor: float = 1.0) -> float:
    """Soft punishment of long answers (DAPO, Yu et al. 2025, eq. 13).

    0 up to ``max_length - cache`` tokens, from there linearly down to ``-factor`` at ``max_length``, and ``-factor``
    beyond it. With ``cache`` 0 there is a hard edge: ``-factor`` beyond ``max_length``.

    Args:
        length: response length in tokens (not characters).
        max_length: longest length in tokens.
        cache: width of the soft zone in tokens.
        factor: largest penalty.

    Raises:
        ValueError: ``cache`` is negative or wider than ``max_length``, or a length is negative.
    """
    if length < 0 or max_length < 0 or not 0 <= cache <= max_length:
        raise ValueError(f"overlong_penalty: length {length}, max_length {max_length}, cache {cache}")
    over = length - (max_length - cache)
    if over <= 0:
        return 0.0
    return -factor * (min(over / cache, 1.0) if cache else 1.0)


def combine(scores: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Weighted sum of the rewards of one sample.

    A reward with weight 0 is a metric only: it may be missing. Any other missing or non-finite reward leaves the sample
    unscored, since leaving its term out would count it as a score of 0.

    Args:
        scores: score by reward name; None where the reward could not score the sample.
        weights: weight by reward name.

    Returns:
        The sum, or None for an unscored sample.

    Raises:
        ValueError: ``scores`` holds a name without a weight.
    """
    if unknown := sorted(set(scores) - set(weights)):
        raise ValueError(f"combine: no weight for {', '.join(unknown)}")
    total = 0.0
    for name, weight in weights.items():
        if weight == 0:
            continue
        score = scores.get(name)
        if score is None or not math.isfinite(score):
            return None
        total += weight * score
    return total
