"""Serves a run's metrics while it goes on, and tells Prometheus where its processes are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nightshift.config import JobSpec
from nightshift.wire.events import Event, EventLog
from orchestrator.api.metrics import RunMetrics, targets_file, write_targets
from orchestrator.runner.books import Books
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.group import GroupRunner
from orchestrator.runner.pipeline import Pipeline
from orchestrator.runner.readings import RunReader
from orchestrator.runner.sampling import TailSampler
from orchestrator.runner.services import Services
from orchestrator.runner.stepper import Stepper

#: Where a job that names no port serves its metrics; set in containers, where the service's /metrics holds them all.
PORT_VARIABLE = "NIGHTSHIFT_METRICS_PORT"


def _default_port() -> int | None:
    text = os.environ.get(PORT_VARIABLE, "")
    return int(text) if text.isdigit() and int(text) < 65536 else None


class Exporter:
    """The metrics of one run, and which of its traces are stored; without a port nothing is counted or served."""

    def __init__(self, spec: JobSpec, run_dir: Path, events: EventLog) -> None:
        self.metrics: RunMetrics | None = None
        self._spec = spec
        self._run_dir = run_dir
        self._events = events
        self._address = ""
        self.sampler = TailSampler(lambda span: events.append_soon("span", **span), spec.tracking.trace_share)

    def start(self) -> None:
        """Listens where the job gives a port, and counts the events from here on.

        Raises:
            BadInputError: the port is taken.
        """
        port = self._spec.resources.ports.metrics
        if port is None:
            port = _default_port()
        if port is None:
            return
        self.metrics = RunMetrics(self._run_dir.name)
        self._address = f"127.0.0.1:{self.metrics.serve(port)}"
        self._events.listeners.append(self._on_event)
        self._events.append("metrics", url=f"http://{self._address}/metrics")

    def watch(
        self,
        services: Services,
        total_steps: int,
        *,
        books: Books,
        fleet: Fleet,
        runner: GroupRunner,
        stepper: Stepper,
        pipeline: Pipeline,
    ) -> None:
        """Reads the run's state at each scrape from here on, and writes down where the run can be scraped."""
        if self.metrics is None:
            return
        self.metrics.watch(
            RunReader(
                self._spec,
                self._run_dir,
                total_steps,
                books=books,
                fleet=fleet,
                runner=runner,
                stepper=stepper,
                pipeline=pipeline,
            )
        )
        servers = [urlsplit(address.url).netloc for address in services.rollout]
        write_targets(
            self._run_dir,
            {"nightshift": [self._address], "nightshift-rollout": servers, "nightshift-ray": services.metrics},
        )

    def on_span(self, span: dict[str, Any]) -> None:
        """Takes a span of any role: counted always, stored where the sampler says so."""
        if self.metrics is not None:
            self.metrics.on_event({"kind": "span", **span})
        self.sampler.offer(span)

    def _on_event(self, event: Event) -> None:
        if self.metrics is not None and event["kind"] != "span":
            self.metrics.on_event(event)

    def close(self) -> None:
        """Stores what is undecided and ends the server; what Prometheus was told is taken back."""
        self.sampler.flush()
        if self.metrics is not None:
            targets_file(self._run_dir).unlink(missing_ok=True)
            if self._on_event in self._events.listeners:
                self._events.listeners.remove(self._on_event)
            self.metrics.close()
