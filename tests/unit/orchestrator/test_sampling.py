"""Tail sampling: failures and slow groups are always stored, of the others the share that was asked for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.trace import new_trace_id
from orchestrator.runner.sampling import TailSampler

NEVER, ALWAYS = "0" * 24 + "ffffffff", "0" * 24 + "00000000"


def span(trace_id: str, name: str = "generate", seconds: float = 1.0, status: str = "unset") -> dict[str, Any]:
    return {"trace_id": trace_id, "name": name, "start": 0.0, "end": seconds, "status": status}


def sampler(share: float, **settings: Any) -> tuple[TailSampler, list[dict[str, Any]]]:
    kept: list[dict[str, Any]] = []
    return TailSampler(kept.append, share, **settings), kept


def test_with_a_share_of_one_every_span_goes_on_at_once() -> None:
    one, kept = sampler(1.0)
    one.offer(span("a" * 32))
    assert len(kept) == 1


def test_a_trace_is_kept_or_dropped_as_a_whole() -> None:
    half, kept = sampler(0.5)
    for trace_id in (NEVER, ALWAYS):
        half.offer(span(trace_id))
        half.offer(span(trace_id, "reward"))
    assert kept == []
    half.offer(span(NEVER, "group"))
    half.offer(span(ALWAYS, "group"))
    assert [(s["trace_id"], s["name"]) for s in kept] == [(ALWAYS, n) for n in ("generate", "reward", "group")]
    assert half.dropped == 3


def test_spans_that_come_late_follow_the_decision() -> None:
    half, kept = sampler(0.5)
    for trace_id in (NEVER, ALWAYS):
        half.offer(span(trace_id, "group"))
        half.offer(span(trace_id, "llm_request"))
    assert [(s["trace_id"], s["name"]) for s in kept] == [(ALWAYS, "group"), (ALWAYS, "llm_request")]


def test_failures_and_retries_are_kept() -> None:
    none, kept = sampler(0.0)
    for name, status in (("generate", "error"), ("retry", "unset")):
        trace_id = new_trace_id()
        none.offer(span(trace_id, name, status=status))
        none.offer(span(trace_id, "group"))
        assert [s["trace_id"] for s in kept[-2:]] == [trace_id] * 2
    assert len(kept) == 4


def test_slow_groups_are_kept() -> None:
    none, kept = sampler(0.0)
    for _ in range(100):
        none.offer(span(new_trace_id(), "group", 1.0 + 0.001 * len(kept)))
    before = len(kept)
    none.offer(span("c" * 32, "group", 9.0))
    assert kept[-1]["trace_id"] == "c" * 32
    assert len(kept) == before + 1


def test_the_jobs_own_trace_is_kept_whole() -> None:
    none, kept = sampler(0.0)
    none.offer(span("d" * 32, "publish"))
    none.keep("d" * 32)
    none.offer(span("d" * 32, "optimizer_step"))
    assert [s["name"] for s in kept] == ["publish", "optimizer_step"]


def test_what_a_runs_end_finds_undecided_is_kept() -> None:
    none, kept = sampler(0.0)
    none.offer(span("e" * 32))
    none.flush()
    assert len(kept) == 1


def test_what_is_held_is_bounded() -> None:
    none, kept = sampler(0.0, most_spans=10)
    for _ in range(50):
        none.offer(span(new_trace_id()))
    assert none.dropped == 40
    assert kept == []


@given(st.floats(0, 0.99), st.integers(50, 300))
def test_the_share_is_about_what_was_asked_for_and_nothing_is_lost_twice(share: float, groups: int) -> None:
    some, kept = sampler(share, slow_share=0.0)
    ids = [f"{0:024x}{(at * 2654435761) % 2**32:08x}" for at in range(groups)]
    for trace_id in ids:
        some.offer(span(trace_id))
        some.offer(span(trace_id, "group"))
    assert len(kept) + some.dropped == 2 * groups
    assert abs(len(kept) / (2 * groups) - share) < 0.15
