"""A policy small enough for arithmetic by hand: one trained bias over the vocabulary, and a fixed table of pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.fixtures.tokenizer_k import EOS, VOCAB_SIZE

Bias = NDArray[np.float64]

#: The id that the toy reward counts: the letter "a" of tokenizer K.
WANTED = 4
_NEVER = -30.0
_TABLE = np.random.default_rng(7).normal(0.0, 0.3, (VOCAB_SIZE, VOCAB_SIZE))


def base_bias() -> Bias:
    """The weights before any training: special tokens but EOS are practically never drawn."""
    bias = np.zeros(VOCAB_SIZE)
    bias[:4] = _NEVER
    bias[EOS] = 0.5
    return bias


def log_probs(bias: Bias, previous: int, temperature: float = 1.0) -> NDArray[np.float64]:
    """Log-probs [V] of the token after ``previous``."""
    logits = (bias + _TABLE[previous]) / temperature
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def score(
    bias: Bias, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probs [T] of the response tokens."""
    previous = int(prompt_ids[-1])
    values = []
    for token in response_ids:
        values.append(log_probs(bias, previous, temperature)[int(token)])
        previous = int(token)
    return np.array(values, np.float32)


def gradient(
    bias: Bias,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    weights: Sequence[float],
    temperature: float = 1.0,
) -> Bias:
    """Gradient [V] of the sum of ``weights`` times the tokens' log-probs."""
    total = np.zeros_like(bias)
    previous = int(prompt_ids[-1])
    for token, weight in zip(response_ids, weights, strict=True):
        total -= float(weight) * np.exp(log_probs(bias, previous, temperature)) / temperature
        total[int(token)] += float(weight) / temperature
        previous = int(token)
    return total


def reward_of(response_ids: Sequence[int]) -> float:
    """Share of the wanted token in a response, 0..1."""
    ids = list(response_ids)
    return ids.count(WANTED) / len(ids) if ids else 0.0
