"""Learning rates by step, also over a resume (case O-24)."""

from __future__ import annotations

import pytest

from nightshift.algorithms.schedule import learning_rate

COSINE = {"peak": 1e-5, "schedule": "cosine", "warmup_steps": 10, "total_steps": 100}


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (5, 5e-6), (9, 9e-6), (10, 1e-5), (40, 7.5e-6), (41, 7.3473578e-6), (80, 1.1697778e-6), (100, 0.0)],
)
def test_o24_cosine_with_warm_up(step: int, rate: float) -> None:
    assert learning_rate(step, **COSINE) == pytest.approx(rate, rel=1e-6, abs=1e-15)


def test_linear_and_constant_end_where_they_should() -> None:
    linear = COSINE | {"schedule": "linear"}
    assert learning_rate(55, **linear) == pytest.approx(5e-6)
    assert learning_rate(200, **linear) == 0.0
    assert learning_rate(99, **COSINE | {"schedule": "constant"}) == 1e-5


def test_what_is_no_step_or_no_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, **COSINE)
    with pytest.raises(ValueError, match="sawtooth"):
        learning_rate(50, **COSINE | {"schedule": "sawtooth"})
