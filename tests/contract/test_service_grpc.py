"""gRPC's JobService: the same calls with the same answers and refusals as REST."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml
from google.protobuf import json_format, struct_pb2

from nightshift.wire.v1 import jobs_pb2, jobs_pb2_grpc
from orchestrator.store.access import Scope
from tests.fakes.service import REWARD, ROOT, ROWS, Api, digest, job, serve


@asynccontextmanager
async def connected(folder: Path, **settings: Any) -> AsyncIterator[tuple[Api, Any, Callable[..., Any]]]:
    """The service, a stub, and metadata of a token with these scopes."""
    async with serve(folder, grpc="127.0.0.1:0", **settings) as api:

        def token(*scopes: Scope, **more: Any) -> tuple[tuple[str, str], ...]:
            return (("authorization", api.token(*scopes, **more)["Authorization"]),)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            yield api, jobs_pb2_grpc.JobServiceStub(channel), token


async def refused(call: Any) -> tuple[grpc.StatusCode, dict[str, Any]]:
    """The code and the problem of a refusal."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), json.loads(trailing["problem-bin"])


async def test_a_job_by_grpc_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with connected(tmp_path) as (api, stub, token):
        admin = token(Scope.ADMIN)
        for data in (REWARD, ROWS):
            chunks = [jobs_pb2.UploadChunk(sha256=digest(data), data=part) for part in (data[:5], data[5:])]
            uploaded = await stub.Upload(iter(chunks), metadata=admin)
            assert uploaded.bytes == len(data)
        request = jobs_pb2.SubmitRequest(job=yaml.safe_dump(job()), priority=2)
        made = await stub.Submit(request, metadata=(*admin, ("idempotency-key", "k")))
        again = await stub.Submit(request, metadata=(*admin, ("idempotency-key", "k")))
        assert (made.id, made.priority) == (again.id, 2)
        ref = jobs_pb2.JobRef(id=made.id)
        kinds = [event.kind async for event in stub.Events(jobs_pb2.EventsRequest(id=made.id), metadata=admin)]
        assert kinds.count("step") == 3
        found = await stub.Get(ref, metadata=admin)
        assert (found.state, found.step, found.exit_code) == ("succeeded", 3, 0)
        assert json_format.MessageToDict(found.spec)["name"] == "tiny"
        rest = (await api.http.get(f"/v1/jobs/{made.id}")).json()
        assert (found.submitted, found.submitter, found.steps) == (rest["submitted"], rest["submitter"], rest["steps"])
        ledger = await stub.GetLedger(ref, metadata=admin)
        assert (ledger.issued, ledger.trained, ledger.balanced) == (3, 3, True)
        metrics = await stub.Metrics(jobs_pb2.MetricsRequest(id=made.id, names=["reward/mean"]), metadata=admin)
        assert [point.metrics["reward/mean"] for point in metrics.points] == [1 / 3, 2 / 3, 1]
        asked = jobs_pb2.RolloutsRequest(id=made.id, step=2, sort="-reward", limit=1)
        rollouts = await stub.Rollouts(asked, metadata=admin)
        assert (rollouts.total, rollouts.rollouts[0]["response"]) == (4, "answer 3")
        trace_id = rollouts.rollouts[0]["trace_id"]
        for job_id in ("", made.id):
            trace = jobs_pb2.TraceRequest(trace_id=trace_id, job=job_id)
            assert (await stub.Trace(trace, metadata=admin))["job"] == made.id
        narrow = {"group_id": rollouts.rollouts[0]["group_id"], "trace_id": trace_id}
        for one, total in ((narrow, 4), ({**narrow, "finish_reason": "nosuch"}, 0), ({"trace_id": "f" * 32}, 0)):
            found = await stub.Rollouts(jobs_pb2.RolloutsRequest(id=made.id, **one), metadata=admin)
            assert found.total == total, one
        asked = jobs_pb2.MetricsRequest(id=made.id, names=["reward/mean"], after=1, before=2)
        assert [point.step for point in (await stub.Metrics(asked, metadata=admin)).points] == [2]
        uploads = await stub.ListUploads(jobs_pb2.ListUploadsRequest(), metadata=admin)
        assert {one.sha256 for one in uploads.uploads} == {digest(REWARD), digest(ROWS)}
        assert uploads.bytes == len(REWARD) + len(ROWS)
        await stub.DeleteUpload(jobs_pb2.UploadRef(sha256=digest(ROWS)), metadata=admin)
        missing = stub.DeleteUpload(jobs_pb2.UploadRef(sha256=digest(ROWS)), metadata=admin)
        assert (await refused(missing))[0] is grpc.StatusCode.NOT_FOUND
        (checkpoint,) = (await stub.Checkpoints(ref, metadata=admin)).checkpoints
        stream = stub.Download(jobs_pb2.DownloadRequest(id=made.id, step=checkpoint.step), metadata=admin)
        archive = b"".join([chunk.data async for chunk in stream])
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            assert opened.getnames() == ["global_step_3/config.json", "global_step_3/model.safetensors"]
        assert "job" in (await stub.Logs(jobs_pb2.LogsRequest(id=made.id), metadata=admin)).text.splitlines()
        assert (await stub.Report(ref, metadata=admin))["run_id"] == made.id
        listed = await stub.List(jobs_pb2.ListRequest(states=["succeeded"]), metadata=admin)
        assert [item.id for item in listed.jobs] == [made.id]
        await stub.Delete(ref, metadata=admin)
        assert (await refused(stub.Get(ref, metadata=admin)))[0] is grpc.StatusCode.NOT_FOUND


async def test_steering_and_settings(tmp_path: Path) -> None:
    async with connected(tmp_path, drive=False) as (api, stub, token):
        made, submit = await api.submit(), token(Scope.SUBMIT)
        ref = jobs_pb2.JobRef(id=made["id"])
        plan = await stub.GetPlan(ref, metadata=submit)
        assert plan == json_format.ParseDict(
            (await api.http.get(f"/v1/jobs/{made['id']}/plan")).json(), struct_pb2.Struct()
        )
        asked = jobs_pb2.ChangeSettingsRequest(id=made["id"])
        asked.changes.update({"rollout_batch_size": 16, "learning_rate": 1e-5})
        changed = await stub.ChangeSettings(asked, metadata=submit)
        assert dict(changed.pending) == {"rollout.batch_size": 16, "trainer.learning_rate": 1e-5}
        shown = {item.key: item for item in (await stub.GetSettings(ref, metadata=submit)).settings}
        assert (shown["rollout.batch_size"].value.number_value, shown["rollout.n"].live) == (8, False)
        assert (await stub.Pause(ref, metadata=submit)).state == "paused"
        assert (await stub.Resume(ref, metadata=submit)).state == "resuming"
        assert (await stub.Cancel(ref, metadata=submit)).state == "cancelled"
        code, problem = await refused(stub.Pause(ref, metadata=submit))
        assert (code, problem["status"], problem["state"]) == (grpc.StatusCode.FAILED_PRECONDITION, 409, "cancelled")


async def test_refusals_are_those_of_rest(tmp_path: Path) -> None:
    async with connected(tmp_path, drive=False) as (api, stub, token):
        await api.http.put("/v1/projects/other", json={})
        made = await api.submit()
        ref, read = jobs_pb2.JobRef(id=made["id"]), token(Scope.READ)
        other = token(Scope.SUBMIT, project="other")
        good = jobs_pb2.SubmitRequest(job=yaml.safe_dump(job()))
        cases = [
            (stub.Get(ref), 401),
            (stub.Get(ref, metadata=(("authorization", "Bearer ns_0_x"),)), 401),
            (stub.Cancel(ref, metadata=read), 403),
            (stub.Submit(good, metadata=token(Scope.SUBMIT)), 403),
            (stub.Get(ref, metadata=other), 404),
            (stub.Cancel(ref, metadata=other), 404),
            (stub.Submit(jobs_pb2.SubmitRequest(job="a: &x 1\nb: *x"), metadata=token()), 422),
            (stub.Submit(jobs_pb2.SubmitRequest(job=yaml.safe_dump(job("../x"))), metadata=token()), 422),
            (stub.Submit(jobs_pb2.SubmitRequest(job="x" * (1 << 20) + "x"), metadata=token()), 413),
            (stub.List(jobs_pb2.ListRequest(states=["nosuch"]), metadata=read), 422),
            (stub.List(jobs_pb2.ListRequest(limit=501), metadata=read), 422),
            (stub.Rollouts(jobs_pb2.RolloutsRequest(id=made["id"], sort="nosuch"), metadata=read), 422),
            (stub.Logs(jobs_pb2.LogsRequest(id=made["id"], role="../../etc/passwd"), metadata=read), 404),
            (stub.Trace(jobs_pb2.TraceRequest(trace_id="x"), metadata=read), 404),
            (stub.Upload(iter([jobs_pb2.UploadChunk(sha256="0" * 64, data=b"x")]), metadata=token()), 422),
            (stub.Upload(iter([]), metadata=token()), 422),
        ]
        for at, (call, status) in enumerate(cases):
            code, problem = await refused(call)
            assert problem["status"] == status, (at, problem)
            assert problem["detail"]
            assert code is not grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Events(jobs_pb2.EventsRequest(id="nosuch"), metadata=read):
                pass
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert not [path for path in (tmp_path / "uploads").rglob(".*") if path.is_file()]
        await asyncio.sleep(0)
