"""V-trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.gae import gae
from nightshift.algorithms.vtrace import vtrace

_TARGET, _BEHAVIOUR = [-0.5, -1.0, -0.2], [-0.7, -0.6, -0.2]
_REWARDS, _VALUES = [0.0, 0.0, 1.0], [0.3, 0.5, 0.4]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def _case(dtype: type, bootstrap: float = 0.0, target: list[float] = _TARGET) -> tuple[np.ndarray, np.ndarray]:
    arrays = [[np.array(part, dtype)] for part in (target, _BEHAVIOUR, _REWARDS, _VALUES)]
    v, advantages = vtrace(*arrays, [np.ones(3)], gamma=0.9, bootstraps=[bootstrap])
    return v[0], advantages[0]


@DTYPES
def test_o06_ended(dtype: type) -> None:
    v, advantages = _case(dtype)
    assert v == pytest.approx([0.691315, 0.768128, 1], abs=1e-5 if dtype is np.float32 else 1e-6)
    assert advantages == pytest.approx([0.391315, 0.268128, 0.6], abs=1e-5 if dtype is np.float32 else 1e-6)


@DTYPES
def test_o06_bootstrap(dtype: type) -> None:
    v, _ = _case(dtype, bootstrap=0.25)
    assert v == pytest.approx([0.813481, 0.903868, 1.225], abs=1e-5 if dtype is np.float32 else 1e-6)


@DTYPES
def test_o06_on_policy_is_the_discounted_return(dtype: type) -> None:
    v, _ = _case(dtype, target=_BEHAVIOUR)
    assert v == pytest.approx([0.81, 0.9, 1.0], abs=1e-6)


def _published_sum(target, behaviour, rewards, values, gamma, rho_max, c_max, last):  # type: ignore[no-untyped-def]
    """Equation 1 of the paper, term by term, and the advantage of section 4.2."""
    ratio = np.exp(np.array(target) - np.array(behaviour))
    rho, c = np.minimum(rho_max, ratio), np.minimum(c_max, ratio)
    following = [*values[1:], last]
    v = []
    for start in range(len(values)):
        total = values[start]
        for token in range(start, len(values)):
            delta = rho[token] * (rewards[token] + gamma * following[token] - values[token])
            total += gamma ** (token - start) * np.prod(c[start:token]) * delta
        v.append(total)
    next_v = [*v[1:], last]
    advantages = [rho[t] * (rewards[t] + gamma * next_v[t] - values[t]) for t in range(len(values))]
    return v, advantages


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.9, 1.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_ragged_batch_with_holes_equals_the_published_sum(seed: int, gamma: float, limit: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, size=3)
    parts = [[rng.normal(-1, 0.7, size=n) for n in lengths] for _ in range(2)]
    parts += [[rng.normal(size=n) for n in lengths] for _ in range(2)]
    masks = [(rng.random(n) < 0.7).astype(np.uint8) for n in lengths]
    last = rng.normal(size=3)
    v, advantages = vtrace(*parts, masks, gamma=gamma, rho_max=limit, c_max=1.0, bootstraps=last)
    for row, mask in enumerate(masks):
        on = np.flatnonzero(mask)
        expected = _published_sum(*(part[row][on] for part in parts), gamma, limit, 1.0, last[row])
        assert v[row][on] == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
        assert advantages[row][on] == pytest.approx(expected[1], rel=1e-9, abs=1e-9)
        assert not v[row][mask == 0].any()
        assert not advantages[row][mask == 0].any()


def test_on_policy_v_trace_has_the_targets_of_gae_with_the_same_lambda() -> None:
    rng = np.random.default_rng(3)
    logprobs, rewards, values = ([rng.normal(size=20)] for _ in range(3))
    masks = [np.ones(20)]
    v, _ = vtrace(logprobs, logprobs, rewards, values, masks, gamma=0.9, trace_lambda=0.8)
    _, returns = gae(rewards, values, masks, gamma=0.9, gae_lambda=0.8)
    assert v[0] == pytest.approx(returns[0], rel=1e-9)


def test_a_huge_ratio_and_wild_masked_values_stay_finite() -> None:
    v, advantages = vtrace(
        [np.array([0.0, np.nan, -1.0])],
        [np.array([-5000.0, np.nan, -1.0])],
        [np.array([0.0, np.inf, 1.0])],
        [np.array([0.1, np.nan, 0.2])],
        [np.array([1, 0, 1])],
    )
    assert np.isfinite(v[0]).all()
    assert np.isfinite(advantages[0]).all()


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences"):
        vtrace([np.zeros(1)], [], [np.zeros(1)], [np.zeros(1)], [np.ones(1)])
