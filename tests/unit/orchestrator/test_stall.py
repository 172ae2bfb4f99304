"""When a server hangs: it has requests and gets on with none of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runner.stall import StallRule


def test_a_server_that_draws_nothing_hangs_after_the_limit() -> None:
    rule = StallRule(10.0)
    assert rule.observe(0.0, requests=3, tokens=50.0) == 0
    assert rule.observe(9.9, requests=3, tokens=50.0) == 0
    assert rule.observe(10.0, requests=3, tokens=50.0) == 10.0


def test_one_token_is_enough() -> None:
    rule = StallRule(10.0)
    rule.observe(0.0, requests=3, tokens=50.0)
    assert rule.observe(9.0, requests=3, tokens=51.0) == 0
    assert rule.observe(18.0, requests=3, tokens=51.0) == 0
    assert rule.observe(19.0, requests=3, tokens=51.0) == 10.0


def test_silence_is_no_progress() -> None:
    rule = StallRule(10.0)
    rule.observe(0.0, requests=1, tokens=50.0)
    assert rule.observe(12.0, requests=1, tokens=None) == 12.0


def test_a_server_without_requests_or_on_hold_is_not_expected_to_draw() -> None:
    rule = StallRule(10.0)
    rule.observe(0.0, requests=0, tokens=50.0)
    assert rule.observe(100.0, requests=0, tokens=50.0) == 0
    assert rule.observe(101.0, requests=2, tokens=50.0) == 0
    rule.reset(109.0)
    assert rule.observe(112.0, requests=2, tokens=50.0) == 0
    assert rule.observe(119.0, requests=2, tokens=50.0) == 10.0


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(0, 4), st.booleans()), max_size=40))
def test_a_server_that_gets_on_once_within_the_limit_never_hangs(readings: list[tuple[float, int, bool]]) -> None:
    rule, now, tokens, since = StallRule(20.0), 0.0, 0.0, 0.0
    for at, (pause, requests, draws) in enumerate(readings):
        now += pause
        tokens += draws
        silent = rule.observe(now, requests=requests, tokens=tokens)
        if draws or not requests or at == 0:
            since = now
        assert (silent > 0) == (now - since >= 20.0)
