"""The service's own figures for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.jobs.states import JobState


class Metrics:
    """Counters of requests and gauges of jobs."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "nightshift_api_requests",
            "Requests by route and status.",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self.seconds = Counter(
            "nightshift_api_request_seconds",
            "Time until responses began, by route.",
            ["route"],
            registry=self._registry,
        )
        self._jobs = Gauge("nightshift_jobs", "Jobs by state.", ["state"], registry=self._registry)
        self._streams = Gauge("nightshift_event_streams", "Open event streams.", registry=self._registry)

        self._servers = Gauge(
            "nightshift_lease_servers",
            "Servers of a fleet: lent, free, or away (lent or not, they do not answer).",
            ["fleet", "state"],
            registry=self._registry,
        )

    def text(self, jobs: dict[str, int], streams: int, servers: dict[str, dict[str, int]]) -> bytes:
        """All figures in Prometheus' text form.

        Args:
            jobs: by state.
            streams: event streams that are open.
            servers: of each fleet, by state.
        """
        self._servers.clear()  # fleets that are gone
        for fleet, states in servers.items():
            for state, count in states.items():
                self._servers.labels(fleet, state).set(count)
        for state in JobState:
            self._jobs.labels(str(state)).set(jobs.get(str(state), 0))
        self._streams.set(streams)
        return generate_latest(self._registry)


class CountRequests:
    """ASGI middleware that counts requests by the route that answered them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and notes its status."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, answered = time.perf_counter(), False

        def note(status: int) -> None:
            nonlocal answered
            answered = True
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(scope["method"], route, str(status)).inc()
            self._metrics.seconds.labels(route).inc(time.perf_counter() - began)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            if not answered:  # what was not foreseen is answered further out
                note(500)
            raise
