"""Whitening with masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.whiten import whiten, whiten_batch

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
@pytest.mark.parametrize("masked", [1000.0, np.nan, np.inf])
def test_o05_four_of_five(dtype: type, masked: float) -> None:
    result = whiten(np.array([2, 4, 4, 6, masked], dtype), [1, 1, 1, 1, 0])
    assert result == pytest.approx([-1.414214, 0, 0, 1.414214, 0], abs=1e-6)


@DTYPES
def test_o05_one_token_is_left_as_it_is(dtype: type) -> None:
    assert list(whiten(np.array([3, 8], dtype), [1, 0])) == [3, 0]


@DTYPES
def test_o05_nothing_unmasked_is_zeros(dtype: type) -> None:
    assert list(whiten(np.array([3, np.nan], dtype), [0, 0])) == [0, 0]


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans())
def test_sequences_are_whitened_together(seed: int, lengths: list[int], shift_mean: bool) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.normal(3, 5, size=n) for n in lengths]
    masks = [(rng.random(n) < 0.7).astype(np.uint8) for n in lengths]
    flat, places = np.concatenate(values), np.concatenate(masks) > 0
    expected = np.where(places, flat, 0.0)
    if places.sum() >= 2:
        mean, std = flat[places].mean(), np.sqrt(flat[places].var() + 1e-8)
        expected = np.where(places, (flat - mean) / std + (0 if shift_mean else mean), 0.0)
    result = np.concatenate(whiten_batch(values, masks, shift_mean=shift_mean))
    assert result == pytest.approx(expected, abs=1e-8)
