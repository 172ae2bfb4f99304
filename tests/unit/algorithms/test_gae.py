"""Generalised advantage estimation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.gae import gae
from nightshift.algorithms.ragged import suffix_recursion, suffix_sums

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def _one(rewards, values, mask, gamma, gae_lambda, bootstrap=0.0, dtype=np.float64):  # type: ignore[no-untyped-def]
    advantages, returns = gae(
        [np.array(rewards, dtype)],
        [np.array(values, dtype)],
        [mask],
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstraps=[bootstrap],
    )
    return advantages[0], returns[0]


def naive_gae(rewards, values, mask, gamma, gae_lambda, bootstrap):  # type: ignore[no-untyped-def]
    """The recursion, token by token over the sampled tokens."""
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    following, carry = bootstrap, 0.0
    for token in reversed([index for index, on in enumerate(mask) if on]):
        delta = rewards[token] + gamma * following - values[token]
        carry = delta + gamma * gae_lambda * carry
        advantages[token], returns[token] = carry, carry + values[token]
        following = values[token]
    return advantages, returns


@DTYPES
@pytest.mark.parametrize("padding", [9.0, np.nan, 1e9])
def test_o02_a_wild_value_on_padding_has_no_influence(dtype: type, padding: float) -> None:
    advantages, returns = _one([0, 0, 1, 0], [0.5, 0.4, 0.6, padding], [1, 1, 1, 0], 1.0, 0.95, dtype=dtype)
    tolerance = 1e-5 if dtype is np.float32 else 1e-6
    assert advantages == pytest.approx([0.451, 0.58, 0.4, 0], abs=tolerance)
    assert returns == pytest.approx([0.951, 0.98, 1, 0], abs=tolerance)


@DTYPES
def test_o03_tool_tokens_give_no_reward_no_value_and_no_decay(dtype: type) -> None:
    advantages, returns = _one([0, 0, 5, 0, 1], [0.2, 0.3, 7, -7, 0.5], [1, 1, 0, 0, 1], 0.9, 0.8, dtype=dtype)
    tolerance = 1e-5 if dtype is np.float32 else 1e-6
    assert advantages == pytest.approx([0.4372, 0.51, 0, 0, 0.5], abs=tolerance)
    assert returns == pytest.approx([0.6372, 0.81, 0, 0, 1], abs=tolerance)


@DTYPES
def test_o04_ended_and_cut_with_bootstrap(dtype: type) -> None:
    tolerance = 1e-5 if dtype is np.float32 else 1e-6
    ended, _ = _one([0, 0], [0.4, 0.6], [1, 1], 0.99, 0.9, dtype=dtype)
    assert ended == pytest.approx([-0.3406, -0.6], abs=tolerance)
    cut, _ = _one([0, 0], [0.4, 0.6], [1, 1], 0.99, 0.9, bootstrap=0.8, dtype=dtype)
    assert cut == pytest.approx([0.365072, 0.192], abs=tolerance)


@st.composite
def _batches(draw: st.DrawFn):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    rewards = [rng.normal(size=length) for length in lengths]
    values = [rng.normal(size=length) for length in lengths]
    masks = [(rng.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))).astype(np.uint8) for length in lengths]
    return rewards, values, masks, rng.normal(size=len(lengths))


@given(_batches(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_the_batched_form_equals_a_loop_over_tokens(batch, gamma: float, gae_lambda: float) -> None:  # type: ignore[no-untyped-def]
    rewards, values, masks, bootstraps = batch
    advantages, returns = gae(rewards, values, masks, gamma=gamma, gae_lambda=gae_lambda, bootstraps=bootstraps)
    for row, mask in enumerate(masks):
        expected = naive_gae(rewards[row], values[row], mask, gamma, gae_lambda, bootstraps[row])
        assert advantages[row] == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
        assert returns[row] == pytest.approx(expected[1], rel=1e-9, abs=1e-9)


@given(_batches())
def test_lambda_1_is_the_return_less_the_value(batch) -> None:  # type: ignore[no-untyped-def]
    rewards, values, masks, _ = batch
    advantages, returns = gae(rewards, values, masks, gamma=0.9, gae_lambda=1.0)
    for row, mask in enumerate(masks):
        on = np.flatnonzero(mask)
        for place, token in enumerate(on):
            total = sum(0.9**step * rewards[row][later] for step, later in enumerate(on[place:]))
            assert returns[row][token] == pytest.approx(total, rel=1e-9, abs=1e-9)
            assert advantages[row][token] == pytest.approx(total - values[row][token], rel=1e-9, abs=1e-9)


@given(st.integers(0, 300), st.integers(0, 3), st.sampled_from([0.0, 0.3, 0.999, 1.0]), st.integers(0, 99))
def test_suffix_sums_in_blocks_equal_the_recursion(width: int, rows: int, factor: float, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, width))
    expected = suffix_recursion(values, np.full_like(values, factor))
    assert np.allclose(suffix_sums(values, factor), expected, rtol=1e-10, atol=1e-10)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        gae([np.zeros(3)], [np.zeros(2)], [np.ones(3)])
    with pytest.raises(ValueError, match="masks"):
        gae([np.zeros(3)], [np.zeros(3)], [np.ones(3), np.ones(3)])
