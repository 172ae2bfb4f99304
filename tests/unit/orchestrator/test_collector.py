"""Frames of a response put together, and the parts of one that was drawn by several servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame, pack_frame
from orchestrator.runner.answers import EngineAwayError, Generated, GenerateRequest, InvalidAnswerError
from orchestrator.runner.collector import Collector
from orchestrator.runner.prefix import completed, join, rest

ID = "run.g0000001.0.0"


def frame(start: int, tokens: int, version: str = "v1", finish: str = "", **changes: Any) -> Frame:
    made = Frame(
        ID,
        start,
        np.arange(start, start + tokens, dtype=np.int32),
        np.full(tokens, -0.5, np.float32),
        [VersionSpan(version, start, start + tokens)] if tokens else [],
        finish,
    )
    return replace(made, **changes)


def collect(*frames: Frame) -> Collector:
    collector = Collector(ID)
    collector.feed(b"".join(pack_frame(item) for item in frames))
    return collector


def test_a_response_is_its_frames() -> None:
    counted = [VersionSpan("v1", 0, 5), VersionSpan("v2", 5, 7)]
    made = collect(frame(0, 3), frame(3, 2), frame(5, 2, "v2", "stop", engine_versions=counted)).finish()
    assert made.response_ids.tolist() == list(range(7))
    assert (made.response_ids.dtype, made.logprobs.dtype) == (np.int32, np.float32)
    assert made.versions == counted
    assert made.finish_reason == "stop"


def test_an_endless_answer_ends_with_the_tokens_that_were_asked_for() -> None:
    collector = Collector(ID, 5)
    collector.feed(pack_frame(frame(0, 3)))
    for _ in range(1000):  # says nothing, as often as it likes
        collector.feed(pack_frame(frame(3, 0)))
    assert len(collector._frames) == 1
    with pytest.raises(InvalidAnswerError, match="6 tokens, and 5 were asked for") as caught:
        collector.feed(pack_frame(frame(3, 3)))
    assert caught.value.kind == "length"
    partial = collector.partial()
    assert partial is not None
    assert partial.response_ids.tolist() == [0, 1, 2]
    collector.feed(pack_frame(frame(3, 2, finish="length")))
    assert len(collector.finish().response_ids) == 5


def test_o34_an_empty_response_is_valid() -> None:
    made = collect(frame(0, 0, finish="stop", engine_versions=[])).finish()
    assert (len(made.response_ids), len(made.logprobs), made.versions) == (0, 0, [])


def test_rounding_above_zero_is_brought_to_zero() -> None:
    made = collect(frame(0, 2, finish="stop", logprobs=np.array([1e-6, -1], np.float32))).finish()
    assert made.logprobs.tolist() == [0.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"request_id": "other"}, "request_id"),
        ({"start": 3}, "form"),
        ({"ids": np.array([1, -2], np.int32)}, "token_ids"),
        ({"logprobs": np.array([-1.0], np.float32)}, "logprobs"),
        ({"logprobs": np.array([-1.0, np.nan], np.float32)}, "logprobs"),
        ({"logprobs": np.array([-1.0, -np.inf], np.float32)}, "logprobs"),
        ({"logprobs": np.array([-1.0, 0.3], np.float32)}, "logprobs"),
        ({"versions": []}, "versions"),
        ({"versions": [VersionSpan("v1", 2, 3)]}, "versions"),
        ({"versions": [VersionSpan("v1", 2, 5)]}, "versions"),
        ({"versions": [VersionSpan("v1", 3, 4)]}, "versions"),
        ({"versions": [VersionSpan("v1", 2, 2), VersionSpan("v1", 2, 4)]}, "versions"),
        ({"versions": [VersionSpan("v1", 0, 4)]}, "versions"),
    ],
)
def test_o31_a_frame_that_does_not_fit_is_refused(changes: dict[str, Any], kind: str) -> None:
    collector = collect(frame(0, 2))
    with pytest.raises(InvalidAnswerError) as caught:
        collector.feed(pack_frame(replace(frame(2, 2), **changes)))
    assert caught.value.kind == kind
    partial = collector.partial()
    assert partial is not None
    assert partial.response_ids.tolist() == [0, 1]  # what came before it stays


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (frame(2, 1), "form"),
        (frame(2, 1, finish="odd"), "finish_reason"),
        (frame(2, 1, "", finish="stop"), "version"),
        (frame(2, 1, finish="stop", engine_versions=[VersionSpan("v2", 0, 3)]), "versions"),
        (frame(2, 1, finish="stop", engine_versions=[VersionSpan("v1", 0, 2)]), "versions"),
    ],
)
def test_a_response_without_a_sound_end_is_refused(last: Frame, kind: str) -> None:
    with pytest.raises(InvalidAnswerError) as caught:
        collect(frame(0, 2), last).finish()
    assert caught.value.kind == kind


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_o38_what_was_drawn_before_the_server_gave_up_is_handed_out(finish: str) -> None:
    with pytest.raises(EngineAwayError) as caught:
        collect(frame(0, 2), frame(2, 1, finish=finish, error="why")).finish()
    partial = caught.value.partial
    assert partial is not None
    assert partial.response_ids.tolist() == [0, 1, 2]
    assert partial.finish_reason == "abort"


def test_no_part_is_handed_out_of_nothing_or_of_unknown_weights() -> None:
    assert Collector(ID).partial() is None
    assert collect(frame(0, 0, finish="abort")).partial() is None
    assert collect(frame(0, 2, "")).partial() is None
    partial = collect(frame(0, 2), frame(2, 1, ""), frame(3, 2, "v2")).partial()
    assert partial is not None
    assert partial.response_ids.tolist() == [0, 1]
    assert partial.versions == [VersionSpan("v1", 0, 2)]


def test_bytes_that_are_no_frames_and_frames_behind_the_last_are_refused() -> None:
    with pytest.raises(InvalidAnswerError):
        Collector(ID).feed(b"<html>..." * 30)
    with pytest.raises(InvalidAnswerError, match="after the last one"):
        collect(frame(0, 1, finish="stop"), frame(1, 1))
    collector = collect(frame(0, 1, finish="stop"))
    collector.feed(b"\x05")
    with pytest.raises(InvalidAnswerError, match="ends before"):
        collector.finish()


# Parts ----------------------------------------------------------------------------------------------------------------


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "prompt_ids": np.array([1, 2], np.int32), "temperature": 1.0}
    return GenerateRequest(**(fields | {"max_tokens": 10, "stop_token_ids": (0,), "min_tokens": 4} | changes))


def part(ids: list[int], version: str = "v1") -> Generated:
    return Generated(
        np.array(ids, np.int32),
        -np.arange(len(ids), dtype=np.float32),
        [VersionSpan(version, 0, len(ids))] if ids else [],
        "abort",
    )


def test_the_rest_is_asked_for_behind_the_prefix() -> None:
    asked = rest(request(), part([7, 8, 9]))
    assert asked.prompt_ids.tolist() == [1, 2, 7, 8, 9]
    assert asked.prompt_ids.dtype == np.int32
    assert (asked.max_tokens, asked.min_tokens) == (7, 1)
    assert rest(request(), part([7] * 6)).min_tokens == 0
    whole = request()
    assert rest(whole, None) is whole


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([7] * 9, None), ([7] * 10, "length"), ([7, 0], "stop"), ([7] * 9 + [0], "stop"), ([0, 7], None), ([], None)],
)
def test_o33_a_prefix_may_be_the_whole(ids: list[int], reason: str | None) -> None:
    whole = completed(request(), part(ids))
    assert (whole.finish_reason if whole else None) == reason
    if whole is not None:
        assert whole.response_ids.tolist() == ids


PARTS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["a", "b"])), min_size=1, max_size=6)


@given(PARTS)
def test_parts_are_joined_without_loss(parts: list[tuple[int, str]]) -> None:
    made: Generated | None = None
    labels: list[str] = []
    for tokens, version in parts:
        made = join(made, replace(part(list(range(tokens)), version), finish_reason="stop"))
        labels += [version] * tokens
    assert made is not None
    assert made.response_ids.tolist() == [token for tokens, _ in parts for token in range(tokens)]
    assert made.logprobs.tolist() == [-float(token) for tokens, _ in parts for token in range(tokens)]
    assert [span.version for span in made.versions for _ in range(span.start, span.end)] == labels
    at = 0
    for span, before in zip(made.versions, [None, *made.versions], strict=False):
        assert span.start == at < span.end
        assert before is None or before.version != span.version
        at = span.end
    assert made.finish_reason == "stop"
