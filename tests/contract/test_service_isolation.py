"""Another project's things are not there, on every route: REST's document and gRPC's descriptors are walked, so that no
route can be forgotten. What belongs to another project is answered as what does not exist, to the letter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml
from google.protobuf import descriptor, message_factory

from nightshift.wire import codec
from nightshift.wire.v1 import fleets_pb2, jobs_pb2
from orchestrator.store.access import Scope
from tests.fakes.service import ROOT, ROWS, Api, digest, job, serve

#: What a project has that another one asks for, and the same kind of thing that nobody has.
ABSENT = {"job_id": "absent-job", "sha256": "0" * 64, "trace_id": "f" * 32, "token_id": "f" * 12, "name": "absent"}
#: Routes that say nothing of any project: whoever has the scope gets the same answer.
COMMON = {
    ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"), ("GET", "/v1/fleets"), ("GET", "/v1/fleets/{name}"),
    ("GET", "/v1/fleets/{name}/leases"), ("POST", "/v1/plan"),
}  # fmt: skip
#: Of the installation as a whole: refused to an administrator of one project, whatever it names.
INSTALLATION = {
    ("PUT", "/v1/fleets/{name}"), ("DELETE", "/v1/fleets/{name}"), ("PUT", "/v1/projects/{name}"), ("GET", "/v1/audit"),
}  # fmt: skip
#: Lists: what is another's is left out.
LISTS = {("GET", "/v1/jobs"), ("GET", "/v1/uploads"), ("GET", "/v1/tokens"), ("GET", "/v1/projects")}
#: Make a thing of one's own project, or find no other to put it in.
MAKERS = {("POST", "/v1/jobs"), ("POST", "/v1/tokens"), ("PUT", "/v1/uploads/{sha256}")}
BODIES: dict[str, Any] = {
    "/v1/jobs": {"json": job()},
    "/v1/tokens": {"json": {"name": "t", "scopes": ["read"], "project": "default"}},
    "/v1/projects/{name}": {"json": {}},
    "/v1/fleets/{name}": {"json": {"servers": []}},
    "/v1/jobs/{job_id}/settings": {"json": {"learning_rate": 1e-5}},
    "/v1/jobs/{job_id}/session": {"content": codec.pack({"kind": "close"})},
    "/v1/uploads/{sha256}": {"content": b"of another hash"},
}


@dataclass(frozen=True)
class World:
    """A service with a finished job of the project ``default``; ``other`` may do anything in the project ``other``."""

    api: Api
    owner: dict[str, str]
    other: dict[str, str]
    present: dict[str, str]

    @property
    def secrets(self) -> list[str]:
        """What no answer to the other project may hold."""
        return [self.present[name] for name in ("job_id", "token_id")]


@asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    async with serve(folder, **settings) as api:
        await api.http.put("/v1/projects/other", json={})
        made = await api.submit(params={"session": "true"})
        await api.wait(made["id"], "succeeded")
        rollouts = (await api.http.get(f"/v1/jobs/{made['id']}/rollouts")).json()["rollouts"]
        token = (await api.http.post("/v1/tokens", json={"name": "t", "scopes": ["read"], "project": "default"})).json()
        present = {
            "job_id": made["id"], "sha256": digest(ROWS), "trace_id": rollouts[0]["trace_id"], "token_id": token["id"],
            "name": "default", "step": "3", "number": "1", "role": "job",
        }  # fmt: skip
        present["file"] = "config.json"
        await api.http.put("/v1/fleets/default", json={"servers": []})
        owner, other = api.token(Scope.ADMIN), api.token(Scope.ADMIN, project="other")
        yield World(api, owner, other, present)


def filled(path: str, values: dict[str, str]) -> str:
    values = values | ({"name": values["file"]} if "/files/" in path else {})
    return path.format(**values)


async def ask(here: World, method: str, path: str, values: dict[str, str], headers: dict[str, str]) -> tuple[int, str]:
    params = {"follow": "false"} if path.endswith("/events") else {"wait_s": "0"} if "/session/" in path else {}
    where = filled(path, values)
    more = BODIES.get(path, {}) if method in ("POST", "PUT", "PATCH") else {}
    answer = await here.api.http.request(method, where, params=params, headers=headers, **more)
    text = answer.text
    for name, value in values.items():
        if name in ABSENT:
            text = text.replace(value, f"<{name}>")
    return answer.status_code, text


async def test_every_route_of_rest(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with world(tmp_path) as here:
        paths = (await here.api.http.get("/openapi.json")).json()["paths"]
        routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        assert len(routes) > 35
        own = 0
        for method, path in routes:
            if (method, path) in COMMON:
                continue
            status, text = await ask(here, method, path, here.present, here.other)
            assert not any(secret in text for secret in here.secrets), (method, path, text)
            if (method, path) in INSTALLATION:
                assert status == 403, (method, path, status, text)
            elif (method, path) in LISTS:
                assert status == 200, (method, path, status, text)
                assert digest(ROWS) not in text
            elif (method, path) in MAKERS:
                assert status in (201, 404, 422), (method, path, status, text)
            else:
                own += 1
                nobody = await ask(here, method, path, here.present | ABSENT, here.other)
                assert (status, text) == nobody, (method, path)
                assert status == 404, (method, path, status, text)
        assert own > 20
        # The same requests of the owner find something: it is the project that makes the difference.
        for method, path in sorted(routes, key=lambda route: (route[0] == "DELETE", route[0] != "GET")):
            if (method, path) in COMMON | INSTALLATION | LISTS | MAKERS:
                continue
            status, text = await ask(here, method, path, here.present, here.owner)
            assert status != 403, (method, path, text)
            assert status != 404, (method, path, text)


async def test_a_parameter_names_no_other_project(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        await api.http.put("/v1/projects/other", json={})
        made = await api.submit()
        other = api.token(Scope.ADMIN, project="other")
        paths = (await api.http.get("/openapi.json")).json()["paths"]
        found = 0
        for path, methods in paths.items():
            for method, operation in methods.items():
                names = [item["name"] for item in operation.get("parameters", []) if item["in"] == "query"]
                if "project" not in names:
                    continue
                found += 1
                where = path.replace("{sha256}", digest(ROWS))
                more = BODIES.get(path, {}) if method in ("post", "put") else {}
                params = {"project": "default"}
                answer = await api.http.request(method.upper(), where, params=params, headers=other, **more)
                assert made["id"] not in answer.text
                assert digest(ROWS) not in answer.text.replace(where, "")
                assert answer.status_code == 404 or answer.json() == {"jobs": [], "next": None}, (method, path)
        assert found >= 5


def methods_of(module: Any) -> list[tuple[str, descriptor.MethodDescriptor]]:
    return [
        (service.full_name, method)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def request_of(method: descriptor.MethodDescriptor, values: dict[str, str]) -> Any:
    """A request whose texts name these things."""
    made = message_factory.GetMessageClass(method.input_type)()
    names = {
        "id": "job_id",
        "job": "job",
        "trace_id": "trace_id",
        "sha256": "sha256",
        "name": "name",
        "project": "project",
    }
    for field in method.input_type.fields:
        value = values.get(names.get(field.name, field.name))
        if field.type == field.TYPE_STRING and not field.is_repeated and value is not None:
            setattr(made, field.name, value)
        elif field.name == "step":
            made.step = 3
        elif field.name == "changes":
            made.changes.update({"learning_rate": 1e-5})
        elif field.name == "present_only":
            made.present_only = True
        elif field.name == "message":
            made.message = codec.pack({"kind": "close"})
    return made


async def called(channel: Any, service: str, method: Any, request: Any, headers: dict[str, str]) -> tuple[str, str]:
    """Code and text of a call's answer."""
    path = f"/{service}/{method.name}"
    answer = message_factory.GetMessageClass(method.output_type)
    kinds = (method.client_streaming, method.server_streaming)
    make = {
        (False, False): channel.unary_unary, (False, True): channel.unary_stream, (True, False): channel.stream_unary,
    }[kinds]  # fmt: skip
    open_call = make(
        path, request_serializer=lambda one: one.SerializeToString(), response_deserializer=answer.FromString
    )
    metadata = (("authorization", headers["Authorization"]),)
    call = open_call(iter([request]) if method.client_streaming else request, metadata=metadata)
    try:
        if method.server_streaming:
            return "OK", "".join([str(item) async for item in call])
        return "OK", str(await call)
    except grpc.aio.AioRpcError as error:
        problem = dict(error.trailing_metadata() or ()).get("problem-bin", b"{}")
        return error.code().name, json.dumps(json.loads(problem))


async def test_every_call_of_grpc(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    open_to_all = {"Plan", "FleetService/List", "FleetService/Get", "FleetService/Leases"}
    refused = {"FleetService/Put", "FleetService/Delete"}
    lists = {"JobService/List"}
    makers = {"JobService/Submit", "JobService/Upload", "JobService/ListUploads"}
    async with (
        world(tmp_path, grpc="127.0.0.1:0") as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.api.service.grpc_port}") as channel,
    ):
        own = 0
        found = [*methods_of(jobs_pb2), *methods_of(fleets_pb2)]
        assert len(found) > 25
        for service, method in found:
            name = f"{service.rpartition('.')[2]}/{method.name}"
            if name in open_to_all or method.name in open_to_all:
                continue
            values = here.present | {"job": yaml.safe_dump(job()), "project": "default"}
            if method.input_type.fields_by_name.get("trace_id"):
                values |= {"job": ""}
            code, text = await called(channel, service, method, request_of(method, values), here.other)
            if name in refused:
                assert code == "PERMISSION_DENIED", (name, code, text)
            elif name in lists:
                assert code == "OK", (name, code, text)
                assert not any(secret in text for secret in here.secrets), (name, text)
            elif name in makers:
                assert code == "NOT_FOUND", (name, code, text)
            else:
                own += 1
                absent = request_of(method, values | ABSENT)
                nobody = await called(channel, service, method, absent, here.other)
                assert code == nobody[0] == "NOT_FOUND", (name, code, nobody)
                shown = text.replace(here.present["job_id"], "<>").replace(here.present["trace_id"], "<>")
                assert shown == nobody[1].replace(ABSENT["job_id"], "<>").replace(ABSENT["trace_id"], "<>"), name
        assert own > 14
