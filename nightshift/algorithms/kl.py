"""Per-token estimators of KL(policy || reference) from tokens of the policy (Schulman, "Approximating KL
Divergence", 2020).

With r = log pi(token) - log ref(token): k1 = r (unbiased, may be negative), k2 = r^2 / 2 (biased, low variance),
k3 = e^(-r) - 1 + r (unbiased, never negative).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Kind = Literal["k1", "k2", "k3"]

#: k3 takes no log-ratio below this: e^20 is about 5e8, while float32 overflows at e^88.
K3_LOG_RATIO_FLOOR = -20.0


def kl_kind(name: str) -> Kind:
    """The estimator whose value a name of the job file stands for: ``k3_st`` has the value of k3."""
    for kind in get_args(Kind):
        if name.removesuffix("_st") == kind:
            found: Kind = kind
            return found
    raise ValueError(f"unknown KL estimator {name!r}, expected k1, k2, k3, k1_st or k3_st")


def kl_terms(
    logprobs: ArrayLike, ref_logprobs: ArrayLike, mask: ArrayLike, kind: Kind
) -> tuple[NDArray[np.floating[Any]], int]:
    """KL estimate of each token.

    Args:
        logprobs: log pi, shape [...]; float32 stays float32, all else is computed in float64.
        ref_logprobs: log ref, the same shape.
        mask: 1 where the policy sampled the token, the same shape. What stands at other places has no influence,
            NaN included.
        kind: the estimator.

    Returns:
        The estimates, 0 where masked, and the number of unmasked tokens whose log-ratio was clamped (k3 only).

    Raises:
        ValueError: unknown kind, or shapes that differ.
    """
    on = np.asarray(mask) > 0
    policy, reference = np.asarray(logprobs), np.asarray(ref_logprobs)
    if not policy.shape == reference.shape == on.shape:
        raise ValueError(f"kl_terms: shapes {policy.shape}, {reference.shape} and {on.shape} differ")
    dtype = np.float32 if policy.dtype == np.float32 and reference.dtype == np.float32 else np.float64
    ratio = np.subtract(policy, reference, out=np.zeros(on.shape, dtype), where=on, dtype=dtype)
    if kind == "k1":
        return ratio, 0
    if kind == "k2":
        return np.asarray(0.5 * ratio * ratio, dtype), 0
    if kind == "k3":
        clamped = int((ratio < K3_LOG_RATIO_FLOOR).sum())
        ratio = np.maximum(ratio, dtype(K3_LOG_RATIO_FLOOR))
        return np.asarray(np.expm1(-ratio) + ratio, dtype), clamped
    raise ValueError(f"kl_terms: unknown estimator {kind!r}, expected k1, k2 or k3")


def masked_mean(values: ArrayLike, mask: ArrayLike) -> float:
    """Mean over the unmasked places, summed in float64; NaN where there is none."""
    on = np.asarray(mask) > 0
    count = int(on.sum())
    return float(np.asarray(values, np.float64)[on].sum() / count) if count else float("nan")
