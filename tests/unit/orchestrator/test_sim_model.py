"""The model of a generation engine: every response gets its tokens, in the time that the slots and the cache allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.alone import generate
from tests.sim.lengths import Lengths
from tests.sim.model import EngineModel, Speed, Stream

PLAIN = Speed(base_s=0.01, sequence_s=0.001, prefill_tokens_s=1000.0, slots=2, kv_tokens=1000)


def run_out(model: EngineModel, now: float = 0.0) -> float:
    """Lets everything end; the time at which it has."""
    while (due := model.next_event()) is not None:
        now = max(now, due) + 1e-9
        model.advance(now)
    return now


def test_the_time_of_a_response_is_reading_and_decoding() -> None:
    ended: list[tuple[str, int]] = []
    model = EngineModel(PLAIN, lambda stream, tokens: ended.append((stream.name, tokens)))
    model.add(Stream("a", 100, 10, mark=10), 5.0)
    assert run_out(model, 5.0) == pytest.approx(5.0 + 0.1 + 10 * 0.011, abs=1e-6)
    assert ended == [("a", 10)]


def test_a_further_response_waits_for_a_slot_and_slows_the_others_down() -> None:
    model = EngineModel(PLAIN, lambda stream, tokens: None)
    for name, length in (("a", 10), ("b", 20), ("c", 5)):
        model.add(Stream(name, 0, length, mark=length), 0.0)
    assert [stream.name for stream in model.running] == ["a", "b"]
    model.advance(10 * 0.012 + 1e-6)
    assert [stream.name for stream in model.running] == ["b", "c"]
    assert run_out(model, 0.121) == pytest.approx(15 * 0.012 + 5 * 0.011, abs=1e-5)


def test_versions_change_at_the_token_at_which_they_were_pushed_and_the_cache_is_read_again() -> None:
    model = EngineModel(PLAIN, lambda stream, tokens: None, version="v0")
    stream = Stream("a", 100, 10, mark=10)
    model.add(stream, 0.0)
    at = 0.1 + 4.5 * 0.011
    model.pause(at)
    model.update("v1", at + 1.0)
    model.clear_cache(at + 1.0)
    assert model.next_token_s(at + 1.0) == pytest.approx(0.104 + 0.011)
    model.resume(at + 1.0)
    assert run_out(model, at + 1.0) == pytest.approx(0.1 + 10 * 0.011 + 1.0 + 0.104, abs=1e-5)
    assert stream.spans == [("v0", 0), ("v1", 4)]
    assert model.recomputed == 104


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    room=st.integers(0, 120),
    pauses=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=4),
    parts=st.integers(1, 20),
)
def test_every_token_is_drawn_once_whatever_is_preempted_and_pushed(
    lengths: list[int], slots: int, room: int, pauses: list[tuple[float, float]], parts: int
) -> None:
    speed = Speed(0.01, 0.001, 500.0, slots, kv_tokens=max(lengths) + 10 + room)
    reported: dict[str, list[int]] = {}

    def report(stream: Stream, tokens: int) -> None:
        reported.setdefault(stream.name, []).append(tokens)
        stream.mark = tokens + parts
        assert model.kv_used <= speed.kv_tokens + len(model.running) + 1e-6
        assert len(model.running) <= slots

    model = EngineModel(speed, report, version="v0")
    streams = [Stream(str(at), 10, length, mark=parts) for at, length in enumerate(lengths)]
    for stream in streams:
        model.add(stream, 0.0)
    now = 0.0
    for at, (ahead, held) in enumerate(pauses):
        now += ahead
        model.pause(now)
        now += held
        model.update(f"v{at + 1}", now)
        model.clear_cache(now)
        model.resume(now)
    run_out(model, now)
    assert not model.running
    assert not model.waiting
    assert model.tokens == sum(lengths)
    for stream in streams:
        marks = reported[stream.name]
        assert marks[-1] == stream.length
        assert marks == sorted(set(marks))
        starts = [first for _, first in stream.spans]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        assert starts[-1] < stream.length


def test_what_the_cache_can_never_hold_is_refused() -> None:
    model = EngineModel(PLAIN, lambda stream, tokens: None)
    with pytest.raises(ValueError, match="the cache holds fewer"):
        model.add(Stream("a", 10, 1000, mark=1000), 0.0)


def test_a_response_that_is_given_up_leaves_its_slot() -> None:
    model = EngineModel(PLAIN, lambda stream, tokens: None)
    gone, waiting, next_one = (Stream(name, 0, 10, mark=10) for name in "abc")
    for stream in (gone, waiting, next_one):
        model.add(stream, 0.0)
    model.remove(gone, 0.05)
    assert model.running == [waiting, next_one]
    model.remove(next_one, 0.05)
    run_out(model, 0.05)
    assert model.tokens == 4 + 10


@given(st.text(min_size=1, max_size=20))
def test_a_sample_has_one_length_within_bounds(name: str) -> None:
    lengths = Lengths()
    assert lengths.of(name) == lengths.of(name)
    assert 1 <= lengths.of(name) <= 8192


def test_lengths_are_those_of_the_distribution() -> None:
    lengths = Lengths()
    drawn = sorted(lengths.of(f"g{at}") for at in range(20_000))
    assert drawn[10_000] == pytest.approx(512, rel=0.05)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.05)
    assert drawn[-1] == 8192


def test_generation_alone_ends_with_the_longest_response() -> None:
    speed = Speed(base_s=0.01, sequence_s=0.0, prefill_tokens_s=1e12, slots=64)
    drawn = generate([f"s{at}" for at in range(32)], 10, 4, speed, Lengths())
    longest = max(Lengths().of(f"s{at}") for at in range(32))
    total = sum(Lengths().of(f"s{at}") for at in range(32))
    assert drawn.seconds == pytest.approx(0.01 * longest, rel=1e-3)
    assert drawn.tokens == total
    assert drawn.occupancy == pytest.approx(total / (32 * longest), rel=1e-3)
