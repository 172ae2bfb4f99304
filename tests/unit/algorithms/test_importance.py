"""Truncated importance weights."""

from __future__ import annotations

import numpy as np
import pytest

from nightshift.algorithms.importance import sequence_weight, token_weights

_TRAINER, _SAMPLER = [-1.0, -0.2, -3.0], [-1.5, -0.4, -2.0]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
def test_o16_token_weights(dtype: type) -> None:
    trainer, sampler = np.array(_TRAINER, dtype), np.array(_SAMPLER, dtype)
    free = token_weights(trainer, sampler, [1, 1, 1], cap=100.0)
    assert free == pytest.approx([1.648721, 1.221403, 0.367879], abs=1e-5 if dtype is np.float32 else 1e-6)
    capped = token_weights(trainer, sampler, [1, 1, 1], cap=1.5)
    assert capped == pytest.approx([1.5, 1.221403, 0.367879], abs=1e-5 if dtype is np.float32 else 1e-6)


@DTYPES
def test_o16_sequence_weights(dtype: type) -> None:
    trainer, sampler = np.array(_TRAINER, dtype), np.array(_SAMPLER, dtype)
    assert sequence_weight(trainer, sampler, [1, 1, 1], cap=2.0) == pytest.approx(0.740818, abs=1e-5)
    assert sequence_weight(trainer, sampler, [1, 1, 0], cap=2.0, mode="mask") == 0.0
    assert sequence_weight(trainer, sampler, [1, 1, 0], cap=2.0) == 2.0
    assert sequence_weight(trainer, sampler, [1, 1, 0], cap=3.0, mode="mask") == pytest.approx(2.013753, abs=1e-5)


def test_masked_tokens_and_huge_ratios() -> None:
    weights = token_weights([0.0, np.nan, -1.0], [-9000.0, 0.0, -1.0], [1, 0, 1], cap=5.0)
    assert list(weights) == [5.0, 0.0, 1.0]
    assert list(token_weights([0.0, 0.0], [-9000.0, 0.0], [1, 1], cap=5.0, mode="mask")) == [0.0, 1.0]
    assert sequence_weight([0.0], [-9000.0], [0], cap=5.0) == 1.0


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="cap"):
        token_weights([0.0], [0.0], [1], cap=0.0)
    with pytest.raises(ValueError, match="drop"):
        token_weights([0.0], [0.0], [1], cap=1.0, mode="drop")  # type: ignore[arg-type]
