"""The OpenAPI document against the service: no 5xx, no status or content that it does not name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nightshift.wire import codec
from orchestrator.api.app import make_app
from orchestrator.api.config import ServiceConfig
from orchestrator.api.service import Service
from orchestrator.store.access import Scope
from tests.fakes.service import Api, job, serve

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/x-msgpack")
def binary(_context: Any, value: Any) -> bytes:
    """A body that is bytes as it is; anything else as a message."""
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else codec.pack({"kind": str(data)})


class Served:
    """An application with jobs in it, and a token."""

    def __init__(self, app: FastAPI, token: str, ids: list[str]) -> None:
        self.app = app
        self.headers = {"Authorization": f"Bearer {token}"}
        self.ids = ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("service")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))

    async def prepare() -> list[str]:
        async with serve(folder) as api:
            done = await api.submit(job("done"))
            await api.wait(done["id"], "succeeded")
            await api.http.put("/v1/projects/other", json={})
            paused = await api.submit(job("paused", steps=500, step_s=0.05))
            await api.http.post(f"/v1/jobs/{paused['id']}/pause")
            await api.wait(paused["id"], "paused")
            return [done["id"], paused["id"]]

    ids = asyncio.run(prepare())
    patch.undo()
    service = Service(ServiceConfig(folder, requests_per_s=1e6, burst=10**6, max_body=1 << 16, max_upload=1 << 16))
    _, token = service.access.create_token("schemathesis", [Scope.ADMIN])
    yield Served(make_app(service, drive=False), token, ids)
    service.engine.dispose()


def operations(app: FastAPI) -> list[Any]:
    """The operations of the document, without those that start a process for each job that they take."""
    found = [result.ok() for result in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    return [operation for operation in found if not operation.path.endswith("/plan")]


def explore(served: Served, examples: int, check: Callable[[Any], None]) -> list[str]:
    """Runs a check on generated requests to every operation; what it found, by operation."""
    found = []
    for operation in operations(served.app):

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            check(case)

        try:
            run()
        except BaseException as error:  # a group of failures; all operations are looked at
            found.append(f"{operation.method.upper()} {operation.path}: {error!r}: {error}")
    return found


def test_every_route_keeps_to_its_document(served: Served) -> None:
    statuses: Counter[int] = Counter()

    def check(case: Any) -> None:
        known = served.ids[len(str(case.body)) % 2]
        if "job_id" in (case.path_parameters or {}) and case.method != "DELETE" and len(str(case.query)) % 4:
            case.path_parameters["job_id"] = known
        if case.operation.path.endswith("/events"):
            case.query = {**(case.query or {}), "follow": "false"}
        response = case.call(headers=served.headers)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    assert explore(served, 20, check) == []
    assert {200, 404, 422} <= set(statuses), statuses


def test_every_route_refuses_a_wrong_token_as_its_document_says(served: Served) -> None:
    def check(case: Any) -> None:
        response = case.call(headers={"Authorization": "Bearer ns_0_wrong"})
        case.validate_response(response, checks=CHECKS)
        if case.operation.path.startswith("/v1/"):
            assert response.status_code in (400, 401, 404, 405, 413, 422)

    assert explore(served, 3, check) == []


def test_every_operation_is_described(served: Served) -> None:
    described = [
        (path, method, operation)
        for path, methods in served.app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(described) > 25
    for path, method, operation in described:
        assert operation.get("description") or operation.get("summary"), (method, path)
        ok = [status for status in operation["responses"] if status.startswith("2")]
        assert ok, (method, path)
        for status, response in operation["responses"].items():
            if status >= "400" and path != "/healthz" and status != "416":
                assert list(response["content"]) == ["application/problem+json"], (method, path, status)
    ids = [operation["operationId"] for _, _, operation in described]
    assert len(set(ids)) == len(ids)
    assert {"submit", "list_jobs", "put_fleet", "ask_session"} <= set(ids), (
        "what a generated client calls its functions"
    )
    assert "learning_rate" in served.app.openapi()["components"]["schemas"]["TrainerConfig"]["properties"]


async def test_the_document_needs_no_token(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        assert isinstance(api, Api)
        answer = await api.http.get("/openapi.json", headers={"Authorization": ""})
        assert answer.status_code == 200
