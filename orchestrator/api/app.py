"""The job service as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from nightshift import __version__
from nightshift.config import JobSpec
from orchestrator.api import (
    problems,
    routes_access,
    routes_data,
    routes_events,
    routes_fleets,
    routes_jobs,
    routes_page,
    routes_session,
    routes_settings,
)
from orchestrator.api.grpc_server import make_server
from orchestrator.api.limits import Limits
from orchestrator.api.metrics import merge
from orchestrator.api.models import Health
from orchestrator.api.problems import MEDIA_TYPE, ProblemError, errors
from orchestrator.api.rate import RateLimit
from orchestrator.api.request_metrics import CountRequests, Metrics
from orchestrator.api.routes_fleets import servers_by_state
from orchestrator.api.scrape import run_expositions
from orchestrator.api.service import Service, ServiceDep

_DESCRIPTION = (
    "Reinforcement-learning jobs for language models. Submit a job file, follow its events, read what it generated, "
    "take its checkpoints. Errors are RFC 9457 problem details."
)


def make_app(service: Service, *, drive: bool = True) -> FastAPI:
    """The application of a service.

    Args:
        drive: whether jobs are started and followed; False serves alone.
    """

    rate = RateLimit(service.config.requests_per_s, service.config.burst, time.monotonic)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        if drive:
            service.scheduler.start()
        server = make_server(service, rate) if service.config.grpc else None
        if server is not None:
            service.grpc_port = server.add_insecure_port(service.config.grpc)
            await server.start()
        yield
        if server is not None:
            await server.stop(grace=2.0)
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="Nightshift",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from another host
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # what a generated client calls its functions
    )
    app.state.service = service
    problems.install(app)
    for module in (
        routes_jobs,
        routes_session,
        routes_settings,
        routes_data,
        routes_events,
        routes_access,
        routes_fleets,
        routes_page,
    ):
        app.include_router(module.router)
    metrics = Metrics()
    _add_health(app, service, metrics)
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(Limits, config=service.config, rate=rate)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_health(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/healthz", response_model=Health, tags=["health"])
    async def healthz() -> Health:
        """Whether the process answers."""
        return Health(version=__version__)

    @app.get("/readyz", response_model=Health, responses=errors(), tags=["health"])
    def readyz(service: ServiceDep) -> Health:
        """Whether the service can take jobs: its database answers, and it is not about to end."""
        if service.scheduler.draining:
            raise ProblemError(503, "the service is about to end: jobs leave a checkpoint", kind="draining")
        try:
            with service.engine.connect() as connection:
                connection.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            raise ProblemError(503, "the database is away", kind="database-away") from error
        return Health(version=__version__)

    @app.get(
        "/metrics",
        name="metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors()},
        tags=["health"],
    )
    def figures() -> Response:
        """Figures for Prometheus, of the service and of all runs: no job's content, and no token needed."""
        own = metrics.text(service.jobs.counts(), service.streams, servers_by_state(service))
        return Response(merge([own, *run_expositions(service.config.runs_dir)]), media_type=CONTENT_TYPE_LATEST)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the job file's schema and problems alone as errors."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        schemas: dict[str, Any] = document["components"]["schemas"]
        job = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= job.pop("$defs", {})
        schemas["JobSpec"] = job
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for path in document["paths"].values():
            for operation in path.values():
                for status, response in operation.get("responses", {}).items():
                    if status.isdigit() and int(status) >= 400:
                        # FastAPI adds the route's own type to each of them.
                        content = response.get("content", {})
                        response["content"] = {MEDIA_TYPE: content[MEDIA_TYPE]} if MEDIA_TYPE in content else {}
        app.openapi_schema = document
    return app.openapi_schema
