"""Spans without the SDK: the same events as with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import StatusCode, Tracer

from nightshift.wire import telemetry
from nightshift.wire.trace import TraceContext, new_trace_id
from orchestrator.runner.light_spans import LightTracer
from orchestrator.runner.tracing import ROLE, SpanEvents, Tracing

JOB = TraceContext.new()


@pytest.fixture(params=["sdk", "light"])
def tracer(request: pytest.FixtureRequest) -> Iterator[tuple[Tracer, list[dict[str, Any]]]]:
    events: list[dict[str, Any]] = []
    if request.param == "light":
        yield LightTracer(events.append, ROLE), events
        return
    yield telemetry.setup(ROLE, None, "run", [SpanEvents(events.append)]), events
    telemetry.shutdown()


def test_a_group_and_what_is_below_it(tracer: tuple[Tracer, list[dict[str, Any]]]) -> None:
    made, events = tracer
    tracing = Tracing(made, JOB)
    group = tracing.group(None, group_id="g1", epoch=0)
    child = tracing.child("rollout", group, role="rollout", sample_id="g1.0")
    with tracing.within(child) as traceparent:
        child.set_attributes({"tokens": 3, "finish": ["stop"], "share": 0.5})
    group.set_attribute("rl.step", 2)
    group.end()
    group.end()
    step = tracing.job_span("optimizer_step", role="trainer", links=[group], step=2)
    step.end()
    tracing.end()
    below, root, update, job = events
    assert below["trace_id"] == root["trace_id"] != job["trace_id"] == update["trace_id"] == JOB.trace_id
    assert traceparent == f"00-{below['trace_id']}-{below['span_id']}-01"
    assert below["parent_id"] == root["span_id"]
    assert root["parent_id"] is None
    assert job["parent_id"] == JOB.span_id
    assert root["links"] == [{"trace_id": job["trace_id"], "span_id": job["span_id"]}]
    assert update["links"] == [{"trace_id": root["trace_id"], "span_id": root["span_id"]}]
    assert below["attributes"] == {
        "job_trace_id": JOB.trace_id,
        "sample_id": "g1.0",
        "tokens": 3,
        "finish": ["stop"],
        "share": 0.5,
    }
    assert root["attributes"] == {"job_trace_id": JOB.trace_id, "group_id": "g1", "epoch": 0, "rl.step": 2}
    assert [event["role"] for event in events] == ["rollout", ROLE, "trainer", ROLE]
    assert [event["status"] for event in events] == ["unset"] * 4
    assert all(event["start"] <= event["end"] for event in events)
    assert [event["name"] for event in events] == ["rollout", "group", "optimizer_step", "job"]


def test_an_error_marks_the_span(tracer: tuple[Tracer, list[dict[str, Any]]]) -> None:
    made, events = tracer
    tracing = Tracing(made, JOB)
    with pytest.raises(KeyError), tracing.within(tracing.child("reward", tracing.group())):
        raise KeyError
    told = tracing.group()
    told.set_status(StatusCode.ERROR, "no sample")
    told.end()
    assert [event["status"] for event in events] == ["error", "error"]


def test_a_group_that_is_made_again_keeps_its_trace(tracer: tuple[Tracer, list[dict[str, Any]]]) -> None:
    made, events = tracer
    tracing, trace_id = Tracing(made, JOB), new_trace_id()
    tracing.group(trace_id).end()
    assert events[0]["trace_id"] == trace_id
    assert events[0]["parent_id"] is not None


def test_a_span_may_be_the_current_one(tracer: tuple[Tracer, list[dict[str, Any]]]) -> None:
    made, events = tracer
    with made.start_as_current_span("above") as above, made.start_as_current_span("below"):
        assert above.is_recording()
    below, over = events
    assert below["parent_id"] == over["span_id"]
    assert not above.is_recording()
