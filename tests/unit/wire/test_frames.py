"""Frames: whole again however they were split, and refused where they are malformed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.experience import VersionSpan
from nightshift.wire.frames import Frame, FrameReader, pack_frame

FLOATS = st.floats(-50, 0, width=32)


@st.composite
def frames(draw: st.DrawFn) -> list[Frame]:
    made, start = [], 0
    for _ in range(draw(st.integers(0, 5))):
        tokens = draw(st.integers(0, 9))
        made.append(
            Frame(
                "run.g.0",
                start,
                np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)), np.int32),
                np.array(draw(st.lists(FLOATS, min_size=tokens, max_size=tokens)), np.float32),
                [VersionSpan(draw(st.text(max_size=4)), start, start + tokens)],
                draw(st.sampled_from(["", "stop", "error"])),
                draw(st.text(max_size=4)),
                draw(st.sampled_from([None, [], [VersionSpan("v", 0, 1)]])),
            )
        )
        start += tokens
    return made


def fields(frame: Frame) -> tuple[object, ...]:
    spans = (frame.versions, frame.engine_versions)
    texts = (frame.request_id, frame.finish_reason, frame.error)
    return (frame.start, frame.ids.tolist(), frame.logprobs.tobytes(), spans, texts)


@given(frames(), st.lists(st.integers(1, 40), max_size=30))
def test_frames_are_whole_again_however_the_bytes_are_cut(made: list[Frame], cuts: list[int]) -> None:
    data = b"".join(pack_frame(frame) for frame in made)
    reader, read, at = FrameReader(), [], 0
    for size in [*cuts, len(data)]:
        read += reader.feed(data[at : at + size])
        at += size
    assert [fields(frame) for frame in read] == [fields(frame) for frame in made]
    assert reader.pending == 0


@given(frames().filter(bool), st.data())
def test_a_cut_off_stream_gives_its_whole_frames(made: list[Frame], data: st.DataObject) -> None:
    parts = [pack_frame(frame) for frame in made]
    cut = data.draw(st.integers(0, sum(map(len, parts)) - 1))
    reader = FrameReader()
    read = reader.feed(b"".join(parts)[:cut])
    ends = np.cumsum([len(part) for part in parts])
    assert len(read) == int((ends <= cut).sum())
    assert reader.pending == cut - (int(ends[len(read) - 1]) if read else 0)


def message(**changes: object) -> bytes:
    values: dict[str, object] = {
        "request_id": "r",
        "start": 0,
        "ids": np.zeros(2, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "versions": [["v", 0, 2]],
        "finish_reason": "",
        "error": "",
        "engine_versions": None,
    }
    body = codec.pack({key: value for key, value in (values | changes).items() if value is not ...})
    return struct.pack("<I", len(body)) + body


def test_the_unspoiled_message_is_read() -> None:
    (frame,) = FrameReader().feed(message())
    assert (frame.end, frame.last) == (2, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": ...},
        {"ids": [1, 2]},
        {"ids": np.zeros(2, np.int64)},
        {"ids": np.zeros((1, 2), np.int32)},
        {"logprobs": np.zeros(2, np.float64)},
        {"logprobs": None},
        {"start": "0"},
        {"start": True},
        {"request_id": 3},
        {"finish_reason": None},
        {"versions": [["v", 0]]},
        {"versions": [[3, 0, 2]]},
        {"versions": [["v", 0.0, 2]]},
        {"versions": 3},
        {"engine_versions": [3]},
    ],
)
def test_a_malformed_frame_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(message(**changes))


@pytest.mark.parametrize(
    "data", [struct.pack("<I", 2**31), struct.pack("<I", 1) + b"\xc1", struct.pack("<I", 1) + b"\x01"]
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(data)
