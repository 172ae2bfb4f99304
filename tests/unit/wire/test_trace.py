import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nightshift.wire import telemetry
from nightshift.wire.errors import WireError
from nightshift.wire.trace import TraceContext, new_span_id, new_trace_id

trace_ids = st.integers(1, 2**128 - 1).map("{:032x}".format)
span_ids = st.integers(1, 2**64 - 1).map("{:016x}".format)


@pytest.fixture
def exporter():
    exporter = InMemorySpanExporter()
    yield exporter
    telemetry.shutdown()


@given(trace_ids, span_ids, st.booleans())
def test_a_traceparent_survives_the_way_there_and_back(trace_id, span_id, sampled):
    context = TraceContext(trace_id, span_id, sampled)
    assert TraceContext.from_traceparent(context.traceparent) == context


def test_the_example_of_the_standard_is_read():
    context = TraceContext.from_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    assert context == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)


def test_a_later_version_may_carry_more_and_other_flags_are_no_sampling():
    later = TraceContext.from_traceparent("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-03-more")
    assert later.sampled
    assert not TraceContext.from_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02").sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    ],
)
def test_other_text_is_refused_here_and_starts_a_trace_of_its_own_in_a_service(text):
    with pytest.raises(WireError):
        TraceContext.from_traceparent(text)
    assert not otel.get_current_span(telemetry.context_from(text)).get_span_context().is_valid


def test_ids_do_not_follow_the_seed_of_random():
    drawn = []
    for _ in range(2):
        random.seed(0)
        generator = telemetry.UrandomIdGenerator()
        drawn += [new_trace_id(), new_span_id(), generator.generate_trace_id(), generator.generate_span_id()]
    assert len(set(drawn)) == len(drawn)
    assert [len(drawn[0]), len(drawn[1])] == [32, 16]


def test_a_child_stays_in_its_trace():
    root = TraceContext.new()
    child = root.child()
    assert (child.trace_id, child.sampled) == (root.trace_id, root.sampled)
    assert child.span_id != root.span_id


def test_a_span_below_a_traceparent_is_the_callers_child(exporter):
    tracer = telemetry.setup("reward", run_id="run-1", processors=[SimpleSpanProcessor(exporter)])
    caller = TraceContext.new()
    with tracer.start_as_current_span("reward.score", telemetry.context_from(caller.traceparent)) as span:
        inner = TraceContext.from_traceparent(telemetry.traceparent_of(span))
    (finished,) = exporter.get_finished_spans()
    assert f"{finished.context.trace_id:032x}" == caller.trace_id == inner.trace_id
    assert f"{finished.parent.span_id:016x}" == caller.span_id
    assert f"{finished.context.span_id:016x}" == inner.span_id == telemetry.trace_context_of(span).span_id
    assert finished.resource.attributes["service.name"] == "nightshift.reward"
    assert finished.resource.attributes[telemetry.RUN_ID] == "run-1"


def test_without_a_parent_a_span_is_sampled_whatever_the_environment_says(exporter, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = telemetry.setup("trainer", processors=[SimpleSpanProcessor(exporter)])
    with tracer.start_as_current_span("step", telemetry.context_from("")):
        pass
    assert len(exporter.get_finished_spans()) == 1


def test_a_caller_that_does_not_sample_is_followed(exporter):
    tracer = telemetry.setup("trainer", processors=[SimpleSpanProcessor(exporter)])
    silent = TraceContext(new_trace_id(), new_span_id(), sampled=False)
    with tracer.start_as_current_span("step", telemetry.context_from(silent.traceparent)) as span:
        assert telemetry.traceparent_of(span).endswith("-00")
    assert not exporter.get_finished_spans()


def test_a_link_points_to_the_span_of_another_trace(exporter):
    tracer = telemetry.setup("orchestrator", processors=[SimpleSpanProcessor(exporter)])
    group = TraceContext.new()
    with tracer.start_as_current_span("step", links=[telemetry.link_to(group.trace_id, group.span_id)]):
        pass
    (link,) = exporter.get_finished_spans()[0].links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (group.trace_id, group.span_id)


def test_a_span_without_ids_has_no_traceparent():
    assert telemetry.traceparent_of(otel.INVALID_SPAN) == ""


def test_shutdown_keeps_its_deadline_where_an_exporter_hangs():
    held = threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans):
            held.wait(60)

    tracer = telemetry.setup("reward", processors=[SimpleSpanProcessor(InMemorySpanExporter()), _batch(Hanging())])
    with tracer.start_as_current_span("a"):
        pass
    began = time.monotonic()
    assert not telemetry.shutdown(0.2)
    assert time.monotonic() - began < 30
    held.set()
    assert telemetry.shutdown(0.2)


def _batch(exporter):
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(exporter, schedule_delay_millis=60_000)
