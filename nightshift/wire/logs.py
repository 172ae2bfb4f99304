"""Log lines that belong together: JSON for machines, text for people, with run, role, step, weights and trace in each.

``NIGHTSHIFT_LOG_FORMAT`` chooses: ``json`` (containers), ``text`` (the default).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, TextIO

from opentelemetry import trace

from nightshift.wire.events import Event, plain

FORMAT_VARIABLE = "NIGHTSHIFT_LOG_FORMAT"
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
#: Libraries that log each request at INFO.
_NOISY = ("httpx", "alembic")
#: What every LogRecord has: anything else was given with ``extra=``.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Context:
    """What a process's log lines say of it; changes as its run goes on."""

    def __init__(self, role: str, run_id: str = "") -> None:
        self.fields: dict[str, Any] = {"role": role, "run_id": run_id, "step": None, "weight_version": None}

    def on_event(self, event: Event) -> None:
        """Follows the run's events: lines behind a step name it and its weights."""
        if event["kind"] == "job" and event.get("step") is not None:
            self._at(event["step"], event.get("lineage"))
        elif event["kind"] == "step":
            self._at(event["step"], None)

    def _at(self, step: int, lineage: int | None) -> None:
        self.fields["step"] = step
        self._lineage = lineage if lineage is not None else getattr(self, "_lineage", 0)
        self.fields["weight_version"] = f"{self.fields['run_id']}/{self._lineage}/{step}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line. ``extra=`` of a call becomes fields of it; a traceback is the field ``traceback``."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its line break."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._context.fields,
            "trace_id": _current_trace(),
        }
        given = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        line |= {key: _as_json(value) for key, value in given.items()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup(role: str, run_id: str = "", stream: TextIO | None = None) -> Context:
    """Sends this process's log lines to a stream (stderr), in the form that the environment asks for."""
    context = Context(role, run_id)
    handler = logging.StreamHandler(stream or sys.stderr)
    as_json = os.environ.get(FORMAT_VARIABLE, "text") == "json"
    handler.setFormatter(JsonFormatter(context) if as_json else logging.Formatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return context


def _current_trace() -> str | None:
    ids = trace.get_current_span().get_span_context()
    return f"{ids.trace_id:032x}" if ids.is_valid else None


def _as_json(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError:
        return str(value)
