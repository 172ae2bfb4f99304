"""Log lines as JSON: every line names run, role, step, weights and trace."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace

from nightshift.wire import logs, telemetry

RUN = "run-1"


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def json_lines(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, logs.Context]:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, "json")
    stream = io.StringIO()
    return stream, logs.setup("trainer", RUN, stream)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_names_run_and_role_and_what_the_call_gave(json_lines: tuple[io.StringIO, logs.Context]) -> None:
    stream, _ = json_lines
    logging.getLogger("x").info("took %d s\nand more", 3, extra={"trace_id": "a" * 32, "odd": object})
    (line,) = lines(stream)
    assert line["message"] == "took 3 s\nand more"
    assert (line["role"], line["run_id"], line["level"], line["logger"]) == ("trainer", RUN, "INFO", "x")
    assert line["trace_id"] == "a" * 32
    assert line["odd"] == str(object)
    assert line["time"].endswith("Z")


def test_a_line_names_the_step_and_the_weights_behind_it(json_lines: tuple[io.StringIO, logs.Context]) -> None:
    stream, context = json_lines
    logging.getLogger("x").info("before")
    context.on_event({"kind": "job", "state": "running", "step": 4, "lineage": 2})
    logging.getLogger("x").info("resumed")
    context.on_event({"kind": "step", "step": 5})
    logging.getLogger("x").info("after")
    found = [(line["step"], line["weight_version"]) for line in lines(stream)]
    assert found == [(None, None), (4, f"{RUN}/2/4"), (5, f"{RUN}/2/5")]


def test_a_line_within_a_span_names_its_trace(json_lines: tuple[io.StringIO, logs.Context]) -> None:
    stream, _ = json_lines
    tracer = telemetry.setup("trainer")
    with tracer.start_as_current_span("work") as span:
        logging.getLogger("x").warning("here")
    telemetry.shutdown()
    assert lines(stream)[0]["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_traceback_is_one_field_of_its_line(json_lines: tuple[io.StringIO, logs.Context]) -> None:
    stream, _ = json_lines
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    (line,) = lines(stream)
    assert "ValueError: broken" in line["traceback"]


def test_people_get_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.FORMAT_VARIABLE, raising=False)
    stream = io.StringIO()
    logs.setup("trainer", RUN, stream)
    logging.getLogger("x").info("hello")
    assert stream.getvalue().endswith("INFO x hello\n")


def test_libraries_that_log_each_request_are_quiet(json_lines: tuple[io.StringIO, logs.Context]) -> None:
    stream, _ = json_lines
    logging.getLogger("httpx").info("HTTP Request: GET")
    assert lines(stream) == []
