"""W3C trace context (https://www.w3.org/TR/trace-context/): the ids in every message, log line and rollout."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nightshift.wire.errors import WireError

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 0x01


def new_trace_id() -> str:
    """A trace id: 32 lower-case hex digits, never all zero.

    Ids come from the operating system: training seeds ``random`` alike in every process, so that ids drawn from it
    would collide.
    """
    return _random_hex(16)


def new_span_id() -> str:
    """A span id: 16 lower-case hex digits, never all zero."""
    return _random_hex(8)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The position in a trace that a message is sent from.

    Raises:
        WireError: an id has the wrong form, or is the all-zero id that the standard keeps for "none".
    """

    trace_id: str  # 32 lower-case hex digits
    span_id: str  # 16 lower-case hex digits
    sampled: bool = True

    def __post_init__(self) -> None:
        if not _TRACE_ID.fullmatch(self.trace_id) or self.trace_id == _NO_TRACE:
            raise WireError(f"trace id {self.trace_id!r} is not 32 lower-case hex digits other than zero")
        if not _SPAN_ID.fullmatch(self.span_id) or self.span_id == _NO_SPAN:
            raise WireError(f"span id {self.span_id!r} is not 16 lower-case hex digits other than zero")

    @classmethod
    def new(cls) -> TraceContext:
        """The root of a new, sampled trace."""
        return cls(new_trace_id(), new_span_id())

    @classmethod
    def from_traceparent(cls, text: str) -> TraceContext:
        """Reads a ``traceparent`` header.

        A version above 00 may carry further fields after the flags, which are ignored, as the standard asks.

        Raises:
            WireError: the text is not such a header.
        """
        match = _TRACEPARENT.fullmatch(text)
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            raise WireError(f"traceparent {text[:100]!r} is not of the form 00-<32 hex>-<16 hex>-<2 hex>")
        return cls(match[2], match[3], bool(int(match[4], 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The header text, version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """A new span id in the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled)


def _random_hex(size: int) -> str:
    while True:
        raw = os.urandom(size)
        if any(raw):
            return raw.hex()
