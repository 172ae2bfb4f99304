"""What the benches of whole jobs rest on: forced lengths, the arms that are missing, and pauses between tokens."""

import numpy as np
import pytest

from nightshift.wire import codec
from nightshift.wire.rollout import ROUTE
from tests.bench.real.in_flight import pauses
from tests.bench.real.lengths import VARIABLE, Lengths, name
from tests.bench.real.middleware import ForcedLengths
from tests.bench.real.record import Record


@pytest.mark.parametrize(("mean", "sigma", "longest"), [(64, 1.0, 256), (32, 1.0, 128), (64, 0.0, 256)])
def test_forced_lengths_have_the_mean_that_was_asked_for(mean, sigma, longest):
    lengths = Lengths(mean, sigma, longest)
    drawn = [lengths.of(name(group, slot)) for group in range(2000) for slot in range(4)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert min(drawn) >= 1
    assert max(drawn) <= longest


def test_forced_lengths_depend_on_the_sample_and_the_seed_alone():
    lengths = Lengths()
    assert Lengths.from_text(lengths.to_text()) == lengths
    named = [f"g{group:07d}.{slot}" for group in range(24, 32) for slot in range(4)]
    assert lengths.batch(3, 8, 4) == [lengths.of(sample) for sample in named]
    assert lengths.batch(0, 8, 4) != Lengths(seed=1).batch(0, 8, 4)


async def asked_for(monkeypatch, lengths, request_id, max_tokens):
    """What reaches the server of a request for a sample."""
    monkeypatch.setenv(VARIABLE, lengths.to_text())
    seen = {}

    async def app(scope, receive, send):
        seen.update(codec.unpack((await receive())["body"]))

    async def receive():
        body = {"request_id": request_id, "token_ids": np.array([1], np.int32), "max_tokens": max_tokens}
        return {"type": "http.request", "body": codec.pack(body | {"stop_token_ids": np.array([2], np.int32)})}

    await ForcedLengths(app)({"type": "http", "method": "POST", "path": ROUTE}, receive, None)
    return seen


async def test_a_sample_is_drawn_to_its_length_and_past_every_stop(monkeypatch):
    lengths = Lengths(longest=256)
    seen = await asked_for(monkeypatch, lengths, "run.g0000007.2.0", 256)
    assert seen["max_tokens"] == lengths.of("g0000007.2")
    assert seen["ignore_eos"] is True
    assert seen["stop_token_ids"] is None


async def test_a_sample_that_goes_on_elsewhere_gets_the_rest_of_its_length(monkeypatch):
    lengths = Lengths(mean=250.0, sigma=0.0, longest=256)
    seen = await asked_for(monkeypatch, lengths, "run.g0000007.2.1", 256 - 100)
    assert seen["max_tokens"] == 150


async def test_requests_of_an_evaluation_keep_their_length(monkeypatch):
    seen = await asked_for(monkeypatch, Lengths(), "run.eval8.3", 8)
    assert seen["max_tokens"] == 8
    assert "ignore_eos" not in seen


def test_a_pause_is_the_gap_that_touches_the_push():
    tokens = [0.0, 0.1, 0.2, 1.5, 1.6, 1.7]
    assert pauses(tokens, [(0.3, 1.0), (5.0, 6.0)]) == pytest.approx([1.3])


def test_a_bench_goes_on_where_it_was_broken_off(tmp_path):
    ran = []

    def measure(arm, number):
        ran.append((arm, number))
        return {"seconds_per_step": {"a": 2.0, "b": 1.0}[arm] + number}

    Record(tmp_path / "x.json").go(["a", "b"], 2, 3, measure)
    assert ran == [("a", 0), ("b", 0), ("b", 1)]
    record = Record(tmp_path / "x.json")
    record.go(["a", "b"], 2, None, measure)
    assert ran[3:] == [("a", 1)]
    assert record.ratios("a", "b", "seconds_per_step") == [2.0, 1.5]
    assert record.median("a", "seconds_per_step") == 2.5
