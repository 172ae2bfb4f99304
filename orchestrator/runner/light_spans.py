"""Spans of the run itself where nothing but ``events.jsonl`` wants them: OpenTelemetry's interface without its SDK.

The SDK takes 35 microseconds of CPU for a span, and eight of them make a prompt group of four samples; these take a
sixth of that. Where spans are exported as well (``tracking.otlp_endpoint``), the SDK's are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
    use_span,
)

#: Takes an ended span, in the form of the ``span`` event.
Sink = Callable[[dict[str, Any]], None]
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_STATUS = {status: status.name.lower() for status in StatusCode}


class LightSpan(Span):
    """One span. Attributes are plain values; a second end is passed over, as OpenTelemetry asks.

    Its ids are kept as text, the form in which nearly all who ask want them.
    """

    __slots__ = (
        "_attributes",
        "_links",
        "_name",
        "_parent_id",
        "_role",
        "_sink",
        "_start",
        "_status",
        "span_id",
        "trace_id",
    )

    def __init__(
        self,
        name: str,
        trace_id: str,
        parent_id: str | None,
        links: Sequence[Link],
        attributes: dict[str, Any],
        sink: Sink,
        role: str,
    ) -> None:
        self._name = name
        self.trace_id = trace_id
        self.span_id = _random(8)
        self._parent_id = parent_id
        self._links = links
        self._attributes = attributes
        self._sink: Sink | None = sink
        self._role = role
        self._status = StatusCode.UNSET
        self._start = time.time()

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return SpanContext(int(self.trace_id, 16), int(self.span_id, 16), is_remote=False, trace_flags=_SAMPLED)

    @property
    def traceparent(self) -> str:
        """What makes a callee's spans its children."""
        return f"00-{self.trace_id}-{self.span_id}-01"

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self._sink is not None

    def set_attribute(self, key: str, value: Any) -> None:
        """Notes one value."""
        self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Notes values."""
        self._attributes.update(attributes)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Notes how it went."""
        self._status = status.status_code if isinstance(status, Status) else status

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Not kept: the ``span`` event has no room for it."""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Any = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Marks it as failed by this error."""
        self._status = StatusCode.ERROR

    def update_name(self, name: str) -> None:
        """Gives it another name."""
        self._name = name

    def end(self, end_time: int | None = None) -> None:
        """Hands it to the sink."""
        sink, self._sink = self._sink, None
        if sink is None:
            return
        attributes = self._attributes
        sink(
            {
                "name": self._name,
                "role": attributes.pop("role", self._role),
                "trace_id": self.trace_id,
                "span_id": self.span_id,
                "parent_id": self._parent_id,
                "links": [
                    {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
                    for link in self._links
                ],
                "start": self._start,
                "end": time.time() if end_time is None else end_time / 1e9,
                "attributes": attributes,
                "status": _STATUS[self._status],
            }
        )


class LightTracer(Tracer):
    """Makes such spans.

    Args:
        sink: takes each ended span.
        role: of spans that name none.
    """

    def __init__(self, sink: Sink, role: str) -> None:
        self._sink = sink
        self._role = role

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """A span below that of the context, or the root of a new trace. It is started now, whatever the kind."""
        parent = get_current_span(context)
        if parent is INVALID_SPAN:
            return LightSpan(name, _random(16), None, links or (), dict(attributes or {}), self._sink, self._role)
        above = parent.get_span_context()
        trace_id, parent_id = f"{above.trace_id:032x}", f"{above.span_id:016x}"
        return LightSpan(name, trace_id, parent_id, links or (), dict(attributes or {}), self._sink, self._role)

    def below(self, parent: LightSpan, name: str, attributes: dict[str, Any]) -> Span:
        """A span below another one, as by :meth:`start_span` without a context; it takes the attributes for its own."""
        return LightSpan(name, parent.trace_id, parent.span_id, (), attributes, self._sink, self._role)

    @contextmanager
    def start_as_current_span(  # type: ignore[override]  # OpenTelemetry's own decorator does more than yield
        self, name: str, *args: Any, **options: Any
    ) -> Iterator[Span]:
        """A span that is the current one meanwhile, and ends with it."""
        with use_span(self.start_span(name, *args, **options), end_on_exit=True) as span:
            yield span


def _random(size: int) -> str:
    """An id that is not 0, from the operating system: training seeds ``random`` alike in every process."""
    while not any(number := os.urandom(size)):
        pass
    return number.hex()
