"""The Prometheus exporter of a runner: fed by the run's events, and by its state at each scrape."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from nightshift.wire import metrics
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import Event
from nightshift.wire.metrics import RUN_LABEL, LabelBound

_log = logging.getLogger(__name__)
#: One value of a state metric: name, labels, value.
Reading = tuple[str, dict[str, str], float]
#: Folder beside the runs with a file for each that can be scraped, in Prometheus' file_sd format. That takes a pattern
#: in the last part of a path only: hence one folder.
TARGETS = "prometheus"
_HOST = "127.0.0.1"


class RunMetrics:
    """Metrics of one run, from the table of :mod:`nightshift.wire.metrics`.

    Nothing here can fail a run: an event that cannot be read is logged and left out.

    Args:
        run_id: label of every series.
    """

    def __init__(self, run_id: str) -> None:
        self.registry = CollectorRegistry()
        self._run = {RUN_LABEL: run_id}
        self._bound = LabelBound()
        self._job_trace_id = ""
        self._lock = threading.Lock()
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._metrics: dict[str, Any] = {}
        for metric in (*metrics.STEP_METRICS, metrics.UNLISTED, *metrics.EVENT_METRICS):
            names = (RUN_LABEL, *metric.labels)
            if metric.kind == "histogram":
                made: Any = Histogram(metric.name, metric.help, names, registry=self.registry, buckets=metric.buckets)
            else:
                made = (Counter if metric.kind == "counter" else Gauge)(
                    metric.name, metric.help, names, registry=self.registry
                )
            self._metrics[metric.name] = made
            if metric.kind == "counter" and len(metric.labels) == 1:
                # From the start, so that a rate sees the first one.
                for value in metrics.LABELS[metric.labels[0]].values:
                    made.labels(**self._run, **{metric.labels[0]: value})
        self._state = StateCollector(self._run, self._bound)
        self.registry.register(self._state)
        ProcessCollector(registry=self.registry)

    # Fed by the run ---------------------------------------------------------------------------------------------------

    def watch(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Sets what reads the run's state at each scrape; it is called from the exporter's thread."""
        self._state.read = read

    def on_event(self, event: Event) -> None:
        """Takes one event of the run."""
        try:
            self._take(event)
        except Exception:
            _log.exception("an event of kind %r could not be counted", event.get("kind"))

    def _take(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "span":
            self._span(event)
        elif kind in ("step", "evaluation"):
            self._values(event.get("metrics") or {})
            if kind == "step":
                self._add("nightshift_steps_total", 1.0)
                seconds = (event.get("metrics") or {}).get("timing/step")
                if seconds is not None:
                    self._observe("nightshift_step_seconds", float(seconds), self._job_trace_id)
        elif kind == "job":
            self._job(str(event.get("state", "")))
        elif kind == "warning":
            self._add("nightshift_warnings_total", 1.0, role=str(event.get("role", "")))
        elif kind == "role" and event.get("state") == "suspect":
            self._add("nightshift_role_suspect_total", 1.0, role=str(event.get("role", "")))

    def _job(self, state: str) -> None:
        for name in ("starting", "running", "succeeded", "interrupted", "failed"):
            self._labelled("nightshift_job_state", state=name).set(1.0 if name == state else 0.0)

    def _span(self, span: Event) -> None:
        name = str(span.get("name"))
        attributes = span.get("attributes") or {}
        if name == "optimizer_step":
            self._job_trace_id = str(span["trace_id"])
        if name not in metrics.STAGES:
            return
        outcome = "error" if span.get("status") == "error" else "ok"
        seconds = max(0.0, float(span["end"]) - float(span["start"]))
        trace_id = str(span["trace_id"])
        self._observe("nightshift_stage_seconds", seconds, trace_id, stage=name, outcome=outcome)
        tokens = attributes.get("gen_ai.usage.output_tokens") if name == "generate" else None
        if tokens is not None:
            self._observe("nightshift_response_tokens", float(tokens), trace_id)

    def _values(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is None or not math.isfinite(float(value)):
                continue
            metric, labels = metrics.step_metric(name)
            if metric.kind == "counter":
                self._add(metric.name, float(value), **labels)
            else:
                self._labelled(metric.name, **labels).set(float(value))

    def _labelled(self, name: str, /, **labels: str) -> Any:
        with self._lock:
            return self._metrics[name].labels(**self._run, **self._bound.bound(metrics.BY_NAME[name], labels))

    def _add(self, name: str, value: float, /, **labels: str) -> None:
        self._labelled(name, **labels).inc(max(0.0, value))

    def _observe(self, name: str, value: float, trace_id: str, /, **labels: str) -> None:
        exemplar = {"trace_id": trace_id} if trace_id else None
        self._labelled(name, **labels).observe(value, exemplar)

    # Given out --------------------------------------------------------------------------------------------------------

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text for Prometheus and its content type; OpenMetrics, with exemplars, where ``accept`` asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def serve(self, port: int, host: str = _HOST) -> int:
        """Serves the metrics from a thread of their own; 0 takes any free port. Returns the port.

        A thread, so that a scrape is answered also while the run's own loop is busy.

        Raises:
            BadInputError: the port is taken.
        """
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise BadInputError(
                f"port {port} for metrics is taken",
                role="orchestrator",
                fix="Set resources.ports.metrics to a free port or 0",
            ) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Ends the server."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


class StateCollector(Collector):
    """The state metrics, read at each scrape. A scrape while the state cannot be read lacks them."""

    def __init__(self, run: dict[str, str], bound: LabelBound) -> None:
        self.read: Callable[[], Iterable[Reading]] = list
        self._run = run
        self._bound = bound

    def describe(self) -> Iterator[Family]:
        """No series: the registry need not read the state to know the names."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """One family per metric that has a reading."""
        families: dict[str, Any] = {}
        try:
            readings = list(self.read())
        except Exception:
            _log.exception("the run's state could not be read")
            return
        for name, labels, value in readings:
            metric = metrics.BY_NAME[name]
            if name not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[name] = kind(name, metric.help, labels=(RUN_LABEL, *metric.labels))
            bound = self._bound.bound(metric, labels)
            families[name].add_metric((self._run[RUN_LABEL], *(bound[label] for label in metric.labels)), value)
        yield from families.values()


def targets_file(run_dir: Path) -> Path:
    """The file that tells Prometheus where the processes of a run can be scraped."""
    return run_dir.parent / TARGETS / f"{run_dir.name}.json"


def write_targets(run_dir: Path, targets: dict[str, list[str]]) -> None:
    """Tells Prometheus where the processes of a run can be scraped.

    Args:
        targets: job name -> addresses as ``host:port``; those without one are left out.
    """
    file = targets_file(run_dir)
    groups = [
        {"targets": addresses, "labels": {"job": job, RUN_LABEL: run_dir.name}}
        for job, addresses in targets.items()
        if addresses
    ]
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".tmp")
    part.write_text(json.dumps(groups, indent=1))
    part.replace(file)


def merge(expositions: Iterable[bytes]) -> bytes:
    """Several processes' metrics as one text: each family's description once, its samples together.

    For the classic text format, in which every line of a family follows its ``# TYPE``. Families of one name must be of
    one kind; the first description stands.
    """
    order: list[str] = []
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for exposition in expositions:
        family, described = "", set[str]()
        for line in exposition.decode().splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in heads:
                    order.append(family)
                    heads[family], samples[family] = [], []
                    described.add(family)
                if family in described:
                    heads[family].append(line)
            elif line and not line.startswith("#"):
                if family not in heads:
                    raise ValueError(f"a sample before any # TYPE line: {line[:100]!r}")
                samples[family].append(line)
    lines = [line for family in order for line in (*heads[family], *samples[family])]
    return ("\n".join(lines) + "\n").encode() if lines else b""
