"""Whitening: zero mean and unit variance over the unmasked tokens of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Doubles = NDArray[np.float64]


def whiten(values: ArrayLike, mask: ArrayLike, *, epsilon: float = 1e-8, shift_mean: bool = True) -> Doubles:
    """(x - mean) / sqrt(variance + epsilon) over the unmasked places, with the population variance.

    Fewer than two unmasked places are returned as they are: they have no spread.

    Args:
        values: any shape; NaN at masked places has no influence.
        mask: the same shape, 1 where a value counts.
        epsilon: added to the variance.
        shift_mean: False keeps the mean.

    Returns:
        float64 of the same shape, 0 where masked.
    """
    return whiten_batch([np.asarray(values)], [np.asarray(mask)], epsilon=epsilon, shift_mean=shift_mean)[0]


def whiten_batch(
    values: Sequence[ArrayLike], masks: Sequence[ArrayLike], *, epsilon: float = 1e-8, shift_mean: bool = True
) -> list[Doubles]:
    """:func:`whiten` over all unmasked tokens of several sequences together; one array per sequence."""
    places = [np.asarray(mask) > 0 for mask in masks]
    kept = [np.asarray(value, np.float64)[on] for value, on in zip(values, places, strict=True)]
    count = sum(len(part) for part in kept)
    shift, scale = 0.0, 1.0
    if count >= 2:
        mean = sum(float(part.sum()) for part in kept) / count
        variance = sum(float(((part - mean) ** 2).sum()) for part in kept) / count
        scale = 1.0 / math.sqrt(variance + epsilon)
        # (x - mean) * scale, and + mean where the mean stays
        shift = mean if shift_mean else mean - mean / scale
    result = []
    for part, on in zip(kept, places, strict=True):
        out = np.zeros(on.shape)
        out[on] = (part - shift) * scale
        result.append(out)
    return result
