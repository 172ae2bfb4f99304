"""The run's own spans: one trace for the job, one linked trace for each prompt group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import Span, Tracer

from nightshift.wire import telemetry
from nightshift.wire.trace import TraceContext, new_span_id
from orchestrator.runner.light_spans import LightSpan, LightTracer

ROLE = "orchestrator"


class SpanEvents(SpanProcessor):
    """Hands each ended span to a sink, in the form of the ``span`` event."""

    def __init__(self, sink: Callable[[dict[str, Any]], None]) -> None:
        self._sink = sink

    def on_end(self, span: ReadableSpan) -> None:
        """Called by the SDK when a span has ended."""
        ids = span.get_span_context()
        if ids is None:
            return
        attributes = dict(span.attributes or {})
        self._sink(
            {
                "name": span.name,
                "role": attributes.pop("role", ROLE),
                "trace_id": f"{ids.trace_id:032x}",
                "span_id": f"{ids.span_id:016x}",
                "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
                "links": [
                    {"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
                    for link in span.links
                ],
                "start": (span.start_time or 0) / 1e9,
                "end": (span.end_time or 0) / 1e9,
                "attributes": {key: list(v) if isinstance(v, tuple) else v for key, v in attributes.items()},
                "status": span.status.status_code.name.lower(),
            }
        )


def run_tracer(run_id: str, sink: Callable[[dict[str, Any]], None], otlp_endpoint: str | None) -> Tracer:
    """What makes the run's own spans and hands each to ``sink``: the SDK only where they are exported as well."""
    if not otlp_endpoint:
        return LightTracer(sink, ROLE)
    return telemetry.setup(ROLE, otlp_endpoint, run_id, [SpanEvents(sink)])


class Tracing:
    """Makes the spans of one run.

    Args:
        tracer: from :func:`run_tracer`.
        job: the job's trace; its span id is the parent of the job's own spans.
    """

    def __init__(self, tracer: Tracer, job: TraceContext) -> None:
        self._tracer = tracer
        self.job_trace_id = job.trace_id
        self._job_root = tracer.start_span("job", context=telemetry.context_from(job.traceparent))

    def end(self) -> None:
        """Ends the job's span."""
        self._job_root.end()

    def group(self, trace_id: str | None = None, **attributes: Any) -> Span:
        """The root span of a prompt group, in a trace of its own that is linked to the job's.

        Args:
            trace_id: the trace of a group that is made again; None: a new trace.
        """
        link = trace.Link(self._job_root.get_span_context())
        attributes["job_trace_id"] = self.job_trace_id
        context = Context()
        if trace_id is not None:
            # The parent is the group's earlier root, whose span id went down with its process.
            context = telemetry.context_from(TraceContext(trace_id, new_span_id(), True).traceparent)
        return self._tracer.start_span("group", context=context, links=[link], attributes=attributes)

    def child(self, name: str, parent: Span, *, role: str = ROLE, **attributes: Any) -> Span:
        """A span below another one; the caller ends it."""
        attributes.update(role=role, job_trace_id=self.job_trace_id)
        if isinstance(self._tracer, LightTracer) and isinstance(parent, LightSpan):
            return self._tracer.below(parent, name, attributes)
        return self._tracer.start_span(
            name, context=trace.set_span_in_context(parent, Context()), attributes=attributes
        )

    def job_span(self, name: str, *, role: str = ROLE, links: Sequence[Span] = (), **attributes: Any) -> Span:
        """A span of the job's own trace, linked to the groups that feed it; the caller ends it."""
        attributes.update(role=role, job_trace_id=self.job_trace_id)
        return self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._job_root, Context()),
            links=[trace.Link(span.get_span_context()) for span in links],
            attributes=attributes,
        )

    def within(self, span: Span) -> AbstractContextManager[str]:
        """Ends the span afterwards, marked as failed where an error passes; yields its traceparent."""
        return _Within(span)


class _Within(AbstractContextManager[str]):
    """A span's time. A class: a generator for each of ten spans of a group costs three times as much."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> str:
        span = self._span
        return span.traceparent if isinstance(span, LightSpan) else telemetry.traceparent_of(span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._span.set_status(trace.StatusCode.ERROR, kind.__name__)
        self._span.end()
