"""OpenTelemetry set-up: one tracer per process, spans sent to the run's OTLP receiver."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from nightshift.wire.errors import WireError
from nightshift.wire.trace import TraceContext, new_span_id, new_trace_id

#: Where a child process finds the run's OTLP/gRPC receiver.
ENDPOINT_VARIABLE = "NIGHTSHIFT_OTLP_ENDPOINT"
#: Attribute of the run on every resource and span.
RUN_ID = "nightshift.run_id"

_log = logging.getLogger(__name__)
#: Seconds for which a service gathers spans before it sends them: short, so that a timeline is nearly complete while a
#: run is watched.
EXPORT_DELAY_S = 1.0
_EXPORT_TIMEOUT_S = 5
_QUEUE_SPANS = 8192
_provider: TracerProvider | None = None


class UrandomIdGenerator(IdGenerator):
    """Ids from os.urandom: training seeds ``random`` alike on every rank, so that the SDK's own ids would collide."""

    def generate_span_id(self) -> int:
        return int(new_span_id(), 16)

    def generate_trace_id(self) -> int:
        return int(new_trace_id(), 16)

    def is_trace_id_random(self) -> bool:
        return True


def setup(
    role: str,
    otlp_endpoint: str | None = None,
    run_id: str = "",
    processors: Sequence[SpanProcessor] = (),
) -> trace.Tracer:
    """Makes this process's tracer; a second call ends the first one's.

    The provider is the module's own, not OpenTelemetry's global one: a library in the same process (vLLM, Ray) may set
    that one for itself.

    Args:
        role: names the service: ``service.name`` is ``nightshift.<role>``.
        otlp_endpoint: ``http://host:port`` of an OTLP/gRPC receiver; None or empty: nothing is exported.
        run_id: attribute ``nightshift.run_id`` of the resource.
        processors: further span processors, such as the orchestrator's own.
    """
    global _provider
    if _provider is not None:
        shutdown()
    attributes: dict[str, str | int] = {"service.name": f"nightshift.{role}", "process.pid": os.getpid()}
    if run_id:
        attributes[RUN_ID] = run_id
    # An environment variable OTEL_TRACES_SAMPLER meant for another program must not thin out the spans of a run.
    provider = TracerProvider(
        sampler=ParentBased(ALWAYS_ON),
        resource=Resource.create(attributes),
        shutdown_on_exit=False,
        id_generator=UrandomIdGenerator(),
    )
    for processor in processors:
        provider.add_span_processor(processor)
    if otlp_endpoint:
        provider.add_span_processor(_exporter(otlp_endpoint))
    _provider = provider
    return provider.get_tracer("nightshift")


def shutdown(timeout_s: float = 5.0) -> bool:
    """Sends what is still held and ends the tracer; safe to call twice.

    Returns:
        Whether the tracer ended within the deadline (spans that a reachable receiver refused are lost all the same).
    """
    global _provider
    provider, _provider = _provider, None
    if provider is None:
        return True
    # The SDK's own flush ignores its time-out while a receiver is away, so that the deadline is kept from outside.
    finished = threading.Event()

    def send() -> None:
        provider.force_flush()
        provider.shutdown()
        finished.set()

    threading.Thread(target=send, name="telemetry-shutdown", daemon=True).start()
    sent = finished.wait(timeout_s)
    if not sent:
        _log.warning("waited %.1f s for the receiver of spans; what was left is lost", timeout_s)
    return sent


def context_from(traceparent: str) -> Context:
    """The OpenTelemetry context of a ``traceparent``, to start a child span in.

    Empty or malformed text gives an empty context, as the standard asks: the span then starts a trace of its own, and
    a broken header never fails a call.
    """
    if not traceparent:
        return Context()
    try:
        parent = TraceContext.from_traceparent(traceparent)
    except WireError:
        return Context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
    remote = trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())


def trace_context_of(span: trace.Span) -> TraceContext:
    """The ids of a span.

    Raises:
        WireError: the span has no valid ids, since no tracer was set up.
    """
    ids = span.get_span_context()
    return TraceContext(f"{ids.trace_id:032x}", f"{ids.span_id:016x}", bool(ids.trace_flags & trace.TraceFlags.SAMPLED))


def traceparent_of(span: trace.Span) -> str:
    """The ``traceparent`` that makes a callee's spans children of ``span``; empty for a span without valid ids."""
    ids = span.get_span_context()
    if not ids.is_valid:
        return ""
    return f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags & trace.TraceFlags.SAMPLED:02x}"


def link_to(trace_id: str, span_id: str) -> trace.Link:
    """A link to a span of another trace, given by its hex ids.

    Raises:
        WireError: an id has the wrong form.
    """
    target = TraceContext(trace_id, span_id)
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    ids = trace.SpanContext(int(target.trace_id, 16), int(target.span_id, 16), is_remote=True, trace_flags=flags)
    return trace.Link(ids)


def _exporter(endpoint: str) -> SpanProcessor:
    # Imported here: grpc costs a quarter of a second, which processes without an exporter need not pay.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    insecure = not endpoint.startswith("https://")
    return BatchSpanProcessor(
        OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S),
        max_queue_size=_QUEUE_SPANS,
        schedule_delay_millis=int(1000 * EXPORT_DELAY_S),
        max_export_batch_size=512,
        export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
    )
