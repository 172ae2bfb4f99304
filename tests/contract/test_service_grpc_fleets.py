"""gRPC's FleetService, and what of REST has a call in gRPC at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nightshift.wire.v1 import fleets_pb2, fleets_pb2_grpc, jobs_pb2
from orchestrator.jobs.leases import Account, Decision
from orchestrator.store.access import Scope
from tests.contract.test_service_grpc import refused
from tests.fakes.service import Api, job, serve

SERVERS = [{"name": "a", "url": "http://127.0.0.1:9"}, {"name": "b", "url": "http://127.0.0.1:10"}]


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[Api, Any, Any]]:
    """The service, a stub, and metadata of a token with these scopes; administrators administer all."""
    async with serve(folder, drive=False, grpc="127.0.0.1:0") as api:

        def token(*scopes: Scope, project: str | None = "default") -> tuple[tuple[str, str], ...]:
            return (("authorization", api.token(*scopes, project=project)["Authorization"]),)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            yield api, fleets_pb2_grpc.FleetServiceStub(channel), token


def lend(api: Api, server: str, job_id: str) -> int:
    """A lease as the service's own thread grants it; its number."""
    right = api.service.fleets.acquire("night", "t", 60.0)
    assert right is not None
    decision = Decision(grants=[(server, job_id)])
    assert api.service.fleets.settle("night", right, 1000.0, {job_id: Account(5.0, -1.0)}, decision)
    return api.service.fleets.leases("night")[0].number


async def test_a_fleet_by_grpc_is_the_one_of_rest(tmp_path: Path) -> None:
    async with connected(tmp_path) as (api, stub, token):
        admin = token(Scope.ADMIN, project=None)
        asked = fleets_pb2.PutFleetRequest(name="night", hold_s=60, servers=SERVERS)
        made = await stub.Put(asked, metadata=admin)
        rest = (await api.http.get("/v1/fleets/night")).json()
        assert (made.hold_s, made.drain_s, made.created) == (60, rest["drain_s"], rest["created"])
        assert [(one.name, one.url, one.token_variable) for one in made.servers] == [
            (one["name"], one["url"], one["token_variable"]) for one in rest["servers"]
        ]
        ref = fleets_pb2.FleetRef(name="night")
        read = token(Scope.READ)
        assert await stub.Get(ref, metadata=read) == made
        assert list((await stub.List(fleets_pb2.ListFleetsRequest(), metadata=read)).fleets) == [made]
        wanted = await api.submit(job(rollout={"fleet": "night"}))
        numbers = [lend(api, server, wanted["id"]) for server in ("a", "b")]
        held = {one.name: one.job_id for one in (await stub.Get(ref, metadata=read)).servers}
        assert held == {"a": wanted["id"], "b": wanted["id"]}
        page = await stub.Leases(fleets_pb2.LeasesRequest(name="night", limit=1), metadata=read)
        (newest,) = page.leases
        assert (newest.number, newest.server, newest.job_id, newest.since) == (numbers[1], "b", wanted["id"], 1000.0)
        assert not newest.HasField("ended")
        rest_page = (await api.http.get("/v1/fleets/night/leases", params={"limit": 1})).json()
        assert (page.next, len(page.shares)) == (rest_page["next"], len(rest_page["shares"]))
        older = fleets_pb2.LeasesRequest(name="night", before=page.next)
        assert [one.number for one in (await stub.Leases(older, metadata=read)).leases] == numbers[:1]
        code, problem = await refused(stub.Delete(ref, metadata=admin))
        assert (code, problem["status"]) == (grpc.StatusCode.FAILED_PRECONDITION, 409)


async def test_what_a_caller_may_not_see_or_do(tmp_path: Path) -> None:
    async with connected(tmp_path) as (api, stub, token):
        admin = token(Scope.ADMIN, project=None)
        await api.http.put("/v1/projects/other", json={})
        put = fleets_pb2.PutFleetRequest(name="night", servers=SERVERS)
        await stub.Put(put, metadata=admin)
        lend(api, "a", (await api.submit(job(rollout={"fleet": "night"})))["id"])
        ref, other = fleets_pb2.FleetRef(name="night"), token(Scope.READ, project="other")
        server = (await stub.Get(ref, metadata=other)).servers[0]
        assert (server.lent, server.job_id) == (True, ""), "lent, but not to whom"
        (lease,) = (await stub.Leases(fleets_pb2.LeasesRequest(name="night"), metadata=other)).leases
        assert lease.job_id == ""
        unknown = fleets_pb2.FleetRef(name="nosuch")
        cases = [
            (stub.List(fleets_pb2.ListFleetsRequest()), 401, ""),
            (stub.Put(put, metadata=token(Scope.SUBMIT)), 403, ""),
            (stub.Put(put, metadata=token(Scope.ADMIN)), 403, ""),  # of one project
            (stub.Delete(ref, metadata=token(Scope.READ)), 403, ""),
            (stub.Get(unknown, metadata=other), 404, ""),
            (stub.Delete(unknown, metadata=admin), 404, ""),
            (stub.Leases(fleets_pb2.LeasesRequest(name="nosuch"), metadata=other), 404, ""),
            (stub.Leases(fleets_pb2.LeasesRequest(name="night", limit=1001), metadata=other), 422, "limit"),
            (stub.Leases(fleets_pb2.LeasesRequest(name="night", before=-1), metadata=other), 422, "before"),
            (stub.Put(fleets_pb2.PutFleetRequest(name="../x", servers=SERVERS), metadata=admin), 422, "name"),
            (stub.Put(fleets_pb2.PutFleetRequest(name="n", hold_s=-1), metadata=admin), 422, "hold_s"),
            (stub.Put(fleets_pb2.PutFleetRequest(name="n", hold_s=float("nan")), metadata=admin), 422, "hold_s"),
            (
                stub.Put(
                    fleets_pb2.PutFleetRequest(name="n", servers=[{"name": "a", "url": "file:///x"}]), metadata=admin
                ),
                422,
                "servers.0.url",
            ),
        ]
        for at, (call, status, field) in enumerate(cases):
            _, problem = await refused(call)
            assert (problem["status"], [one["field"] for one in problem.get("errors", [])]) == (
                status,
                [field] if field else [],
            ), at
        assert [one.name for one in (await stub.List(fleets_pb2.ListFleetsRequest(), metadata=admin)).fleets] == [
            "night"
        ]


#: Of REST's routes for jobs and fleets: the call of gRPC that does the same. "": none, for a reason.
CALLS = {
    "post /v1/jobs": "Submit",
    "get /v1/jobs": "List",
    "get /v1/jobs/{job_id}": "Get",
    "delete /v1/jobs/{job_id}": "Delete",
    "post /v1/jobs/{job_id}/pause": "Pause",
    "post /v1/jobs/{job_id}/resume": "Resume",
    "post /v1/jobs/{job_id}/cancel": "Cancel",
    "post /v1/plan": "Plan",
    "get /v1/jobs/{job_id}/plan": "GetPlan",
    "post /v1/jobs/{job_id}/session": "",  # a mailbox of the Python trainer
    "get /v1/jobs/{job_id}/session/{number}": "",
    "get /v1/jobs/{job_id}/settings": "GetSettings",
    "patch /v1/jobs/{job_id}/settings": "ChangeSettings",
    "get /v1/jobs/{job_id}/metrics-history": "Metrics",
    "get /v1/jobs/{job_id}/rollouts": "Rollouts",
    "get /v1/jobs/{job_id}/ledger": "GetLedger",
    "get /v1/jobs/{job_id}/checkpoints": "Checkpoints",
    "get /v1/jobs/{job_id}/checkpoints/{step}/archive": "Download",
    "get /v1/jobs/{job_id}/checkpoints/{step}/files/{name}": "Download",
    "get /v1/jobs/{job_id}/logs": "Logs",
    "get /v1/jobs/{job_id}/logs/{role}": "Logs",
    "get /v1/jobs/{job_id}/report": "Report",
    "get /v1/traces/{trace_id}": "Trace",
    "get /v1/jobs/{job_id}/events": "Events",
    "put /v1/uploads/{sha256}": "Upload",
    "get /v1/uploads/{sha256}": "Upload",  # asks whether one is there; sending it again is harmless
    "get /v1/uploads": "ListUploads",
    "delete /v1/uploads/{sha256}": "DeleteUpload",
    "get /v1/fleets": "FleetService.List",
    "get /v1/fleets/{name}": "FleetService.Get",
    "put /v1/fleets/{name}": "FleetService.Put",
    "delete /v1/fleets/{name}": "FleetService.Delete",
    "get /v1/fleets/{name}/leases": "FleetService.Leases",
}
#: Tokens, projects and the audit log are administered by REST alone.
ADMINISTRATION = ("/v1/tokens", "/v1/projects", "/v1/audit")


async def test_every_call_of_rest_has_one_here(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        paths = (await api.http.get("/openapi.json")).json()["paths"]
    routes = {
        f"{method} {path}"
        for path, operations in paths.items()
        for method in operations
        if path.startswith("/v1/") and not path.startswith(ADMINISTRATION)
    }
    assert routes == set(CALLS)
    methods = {method.name for method in jobs_pb2.DESCRIPTOR.services_by_name["JobService"].methods}
    fleets = fleets_pb2.DESCRIPTOR.services_by_name["FleetService"].methods
    methods |= {f"FleetService.{method.name}" for method in fleets}
    assert methods == {call for call in CALLS.values() if call}
