"""KL estimators."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.kl import K3_LOG_RATIO_FLOOR, kl_terms, masked_mean

_LOGPROBS, _REFERENCE, _MASK = [-1.0, -2.0, -0.5, -3.0], [-1.2, -1.5, -0.5, -50.0], [1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("kind", "tokens", "mean"),
    [
        ("k1", [0.2, -0.5, 0.0, 0.0], -0.1),
        ("k2", [0.02, 0.125, 0.0, 0.0], 0.0483333),
        ("k3", [0.0187308, 0.1487213, 0.0, 0.0], 0.0558173),
    ],
)
def test_o01_estimators_and_masked_mean(dtype: type, kind: str, tokens: list[float], mean: float) -> None:
    terms, clamped = kl_terms(np.array(_LOGPROBS, dtype), np.array(_REFERENCE, dtype), _MASK, kind)
    tolerance = 1e-5 if dtype is np.float32 else 1e-6
    assert terms.dtype == dtype
    assert terms == pytest.approx(tokens, abs=tolerance)
    assert masked_mean(terms, _MASK) == pytest.approx(mean, abs=tolerance)
    assert clamped == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf, 1e30])
def test_o01_the_masked_slot_has_no_influence(kind: str, wild: float) -> None:
    plain, _ = kl_terms(_LOGPROBS, _REFERENCE, _MASK, kind)
    changed, clamped = kl_terms([*_LOGPROBS[:3], wild], [*_REFERENCE[:3], -wild], _MASK, kind)
    assert np.array_equal(plain, changed)
    assert clamped == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_o01_a_huge_log_ratio_is_clamped_and_counted_by_k3_alone(dtype: type) -> None:
    policy, reference = np.array([-101.0, -1.0], dtype), np.array([-1.0, -1.0], dtype)
    k3, clamped = kl_terms(policy, reference, [1, 1], "k3")
    assert np.isfinite(k3).all()
    assert k3[0] == pytest.approx(math.expm1(20) - 20, rel=1e-6)
    assert clamped == 1
    k1, clamped = kl_terms(policy, reference, [1, 1], "k1")
    assert list(k1) == [-100.0, 0.0]
    assert clamped == 0
    assert np.isfinite(kl_terms(policy, reference, [1, 1], "k2")[0]).all()


def test_k1_and_k3_have_the_exact_divergence_as_mean() -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = float((policy * np.log(policy / reference)).sum())
    for kind in ("k1", "k3"):
        terms, _ = kl_terms(np.log(policy), np.log(reference), [1, 1, 1], kind)
        assert float((policy * terms).sum()) == pytest.approx(exact, abs=1e-12)


@given(st.lists(st.tuples(st.floats(-40, 0), st.floats(-40, 0)), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_k3_matches_a_plain_loop(pairs: list[tuple[float, float]]) -> None:
    policy, reference = map(list, zip(*pairs, strict=True))
    mask = [1] * len(pairs)
    assert (kl_terms(policy, reference, mask, "k2")[0] >= 0).all()
    terms, clamped = kl_terms(policy, reference, mask, "k3")
    assert (terms >= 0).all()
    count = 0
    for term, (one, other) in zip(terms, pairs, strict=True):
        ratio = max(one - other, K3_LOG_RATIO_FLOOR)
        count += one - other < K3_LOG_RATIO_FLOOR
        assert term == pytest.approx(math.exp(-ratio) - 1 + ratio, rel=1e-9, abs=1e-9)
    assert clamped == count


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_terms([0.0], [0.0], [1], "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shapes"):
        kl_terms([0.0, 1.0], [0.0], [1], "k1")


def test_masked_mean_of_nothing_is_nan() -> None:
    assert math.isnan(masked_mean([1.0], [0]))
