"""The token bucket."""

from __future__ import annotations

from orchestrator.api.rate import RateLimit


def test_a_burst_then_the_long_run() -> None:
    now = [0.0]
    limit = RateLimit(2.0, 3, lambda: now[0])
    assert [limit.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.take("b") == 0.0, "callers do not share"
    now[0] = 0.5
    assert limit.take("a") == 0.0
    assert limit.take("a") == 0.5
    now[0] = 100.0
    assert [limit.take("a") == 0.0 for _ in range(4)] == [True, True, True, False]


def test_quiet_callers_are_forgotten() -> None:
    limit = RateLimit(1.0, 1, lambda: 0.0, callers=2)
    for caller in ("a", "b", "c"):
        limit.take(caller)
    assert limit.take("a") == 0.0
    assert limit.take("c") == 1.0
