"""Frames of a generated response: length-prefixed msgpack messages, so that a prefix of it is whole at any moment.

A frame is four bytes of length (unsigned, little-endian) and one message of :mod:`nightshift.wire.codec`:
``{"request_id": str, "start": int, "ids": int32 [n], "logprobs": float32 [n], "versions": [[version, start, end],
...], "finish_reason": str, "error": str, "engine_versions": [[version, start, end], ...] | None}``.
Offsets count tokens of the response; the versions of a frame cover its own tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.experience import Floats, Ids, VersionSpan

CONTENT_TYPE = "application/vnd.nightshift.frames"
FINISH_ERROR = "error"
#: Version of tokens of which the server cannot say with which weights they were sampled.
UNKNOWN_VERSION = ""

_LENGTH = struct.Struct("<I")
#: Far above any response: 8 bytes a token, and a few for each version.
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens [start, start + n) of a response.

    Attributes:
        finish_reason: "" while more frames follow; "error" where the request ended without a result.
        error: why, then.
        engine_versions: of a last frame: the spans of the whole response as vLLM itself counted them, None where it
            does not.
    """

    request_id: str
    start: int
    ids: Ids  # [n] int32
    logprobs: Floats  # [n] float32
    versions: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    engine_versions: list[VersionSpan] | None = None

    @property
    def end(self) -> int:
        """Tokens of the response up to the end of this frame."""
        return self.start + len(self.ids)

    @property
    def last(self) -> bool:
        """Whether no frame follows."""
        return bool(self.finish_reason)


def pack_frame(frame: Frame) -> bytes:
    """A frame with its length before it."""
    message = codec.pack_known(
        {
            "request_id": frame.request_id,
            "start": frame.start,
            "ids": frame.ids,
            "logprobs": frame.logprobs,
            "versions": _rows(frame.versions),
            "finish_reason": frame.finish_reason,
            "error": frame.error,
            "engine_versions": None if frame.engine_versions is None else _rows(frame.engine_versions),
        }
    )
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """Cuts a stream of bytes into frames, however it was split on its way."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not come in whole."""
        return len(self._data)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that these bytes complete.

        Raises:
            WireError: a frame is malformed, or too long to be one.
        """
        if self._data:
            self._data += data
        held = self._data or data  # most frames come whole, and are read where they are
        frames: list[Frame] = []
        at = 0
        while len(held) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, at)
            if length > _LARGEST:
                raise WireError(f"frame of {length} bytes")
            end = at + _LENGTH.size + length
            if len(held) < end:
                break
            frames.append(_frame(bytes(held[at + _LENGTH.size : end])))
            at = end
        if self._data:
            del self._data[:at]
        else:
            self._data += data[at:]
        return frames


def _rows(spans: list[VersionSpan]) -> list[list[Any]]:
    return [[span.version, span.start, span.end] for span in spans]


def _spans(rows: Any) -> list[VersionSpan]:
    spans = [VersionSpan(*row) for row in rows]
    for span in spans:
        if not isinstance(span.version, str) or type(span.start) is not int or type(span.end) is not int:
            raise WireError(f"malformed version span {span}")
    return spans


def _frame(data: bytes) -> Frame:
    values = codec.unpack(data)
    try:
        engine = values["engine_versions"]
        frame = Frame(
            request_id=values["request_id"],
            start=values["start"],
            ids=values["ids"],
            logprobs=values["logprobs"],
            versions=_spans(values["versions"]),
            finish_reason=values["finish_reason"],
            error=values["error"],
            engine_versions=None if engine is None else _spans(engine),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"malformed frame: {type(error).__name__}: {error}") from error
    texts = (frame.request_id, frame.finish_reason, frame.error)
    if type(frame.start) is not int or not all(isinstance(text, str) for text in texts):
        raise WireError("malformed frame: a field has another type")
    for name, array, dtype in (("ids", frame.ids, np.int32), ("logprobs", frame.logprobs, np.float32)):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            raise WireError(f"malformed frame: {name} is no {dtype.__name__} array of one dimension")
    return frame
