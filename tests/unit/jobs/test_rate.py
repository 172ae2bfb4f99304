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


def test_only_credentials_that_were_good_have_a_rate_of_their_own() -> None:
    limit = RateLimit(1.0, 2, lambda: 0.0, callers=2)
    assert limit.caller("good", "10.0.0.1") == "10.0.0.1"
    limit.note_good("good")
    assert limit.caller("good", "10.0.0.1") == "good"
    guesses = [limit.take(limit.caller(f"guess-{at}", "10.0.0.1")) for at in range(4)]
    assert guesses == [0.0, 0.0, 1.0, 1.0]
    assert limit.take(limit.caller("good", "10.0.0.1")) == 0.0, "who has a token is not held up"
    for at in range(2):
        limit.note_good(f"other-{at}")
    assert limit.caller("good", "10.0.0.1") == "10.0.0.1", "the one that was quiet longest is forgotten"
