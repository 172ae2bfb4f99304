"""Documents, uploads and streams of somebody who means harm, or whose program does: refused, bounded, never a 500."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import yaml
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, OperationalError

from nightshift.wire.v1 import jobs_pb2, jobs_pb2_grpc
from orchestrator.api.problems import MEDIA_TYPE, answer
from orchestrator.store.access import Scope
from tests.fakes.service import ROOT, Api, digest, job, serve
from tests.fakes.up import Up

HEX = "0x" + "f" * 20_000
#: Name -> document of YAML, and what is said about it.
DOCUMENTS = {
    "a hexadecimal number": (f"name: x\ntrainer: {{total_steps: {HEX}}}", "a number of 20002 characters"),
    "a number in sixties": ("name: 1" + ":1" * 100_000, "a number of 200001 characters"),
    "a number that JSON cannot carry": ("name: x\ntrainer: {total_steps: 9007199254740993}", "'trainer.total_steps'"),
    "keys that are no text": ("name: x\nnull: {true: 1}", "line 2: a key must be a name"),
    "a date as a key": ("2001-01-01: x", "line 1: a key must be a name"),
    "a merge": ("<<: {name: a}", "line 1: a key must be a name"),
    "half a pair": ('name: "\\ud800"', "must be 1 to 64 letters"),
    "a place that is no number": ("name: ${rewards[²]}\nrewards: [x]", "refers to nothing"),
    "a place of many digits": (f"name: ${{rewards[{'9' * 5000}]}}\nrewards: [x]", "refers to nothing"),
    "text by reference": (yaml.safe_dump({"z": "v" * 30_000, "y": ["${z}"] * 15_000}), "more text than a job can hold"),
    "a long key": (f"{'k' * 1000}: 1", "unknown key"),
    "a long name": (f"name: {'n' * 100_000}", "must be 1 to 64 letters"),
    "many wrong keys": (yaml.safe_dump({f"k{at}": 1 for at in range(9_000)}), "unknown key"),
    "many that are nearly right": (yaml.safe_dump({"trainer": {f"learning_rat{at}": 1 for at in range(9_000)}}), "is"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
async def test_a_document_is_refused_in_few_words(tmp_path: Path, name: str) -> None:
    """Over REST and gRPC, whose metadata takes 8 KiB; what was sent does not come back whole."""
    text, says = DOCUMENTS[name]
    async with serve(tmp_path, drive=False, grpc="127.0.0.1:0") as api:
        headers = {"content-type": "application/yaml"}
        for path in ("/v1/jobs", "/v1/plan"):
            answer = await api.http.post(path, content=text, headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) in [(422, MEDIA_TYPE), (400, MEDIA_TYPE)]
            assert says in json.dumps(answer.json(), ensure_ascii=False), answer.text[:300]
            assert len(answer.content) < 30_000
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            stub = jobs_pb2_grpc.JobServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Submit(jobs_pb2.SubmitRequest(job=text), metadata=admin(api))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
        assert json.loads(dict(caught.value.trailing_metadata() or ())["problem-bin"])["status"] in (400, 422)
        assert not list((tmp_path / "runs").iterdir())


def admin(api: Api) -> tuple[tuple[str, str], ...]:
    return (("authorization", api.token(Scope.ADMIN)["Authorization"]),)


async def test_others_are_answered_while_a_large_document_is_read(tmp_path: Path) -> None:
    """It is read in a thread: what takes a second there must not hold up the loop that answers all others."""
    async with serve(tmp_path, drive=False) as api:
        headers = {"content-type": "application/yaml"}
        large = asyncio.create_task(api.http.post("/v1/jobs", content="name: " + "a" * 900_000, headers=headers))
        answered = 0
        while not large.done():
            assert (await api.http.get("/healthz")).status_code == 200
            answered += 1
            await asyncio.sleep(0.01)
        assert (await large).status_code == 422
        assert answered > 1


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/v1/jobs?name=a%00b", None),
        ("GET", "/v1/jobs?project=%00", None),
        ("GET", "/v1/audit?target=%00", None),
        ("GET", "/v1/jobs/JOB/rollouts?group_id=%00", None),
        ("POST", "/v1/tokens", '{"name": "t", "scopes": ["read"], "project": "a\\u0000b"}'),
        ("POST", "/v1/tokens", '{"name": "t", "scopes": ["read"], "project": "\\ud800"}'),
        ("PATCH", "/v1/jobs/JOB/settings", '{"\\ud800": 1}'),
        ("PATCH", "/v1/jobs/JOB/settings", '{"on_stale": "\\udfff"}'),
        ("PATCH", "/v1/jobs/JOB/settings", '{"rollout_batch_size": 9007199254740994}'),
        ("PATCH", "/v1/jobs/JOB/settings", '{"rollout_batch_size": ' + "9" * 4000 + "}"),
        ("PUT", "/v1/projects/p", '{"max_running": ' + "9" * 4000 + "}"),
    ],
)
async def test_odd_texts_and_numbers_are_refused_before_a_database_sees_them(
    tmp_path: Path, method: str, path: str, content: str | None
) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        headers = {"content-type": "application/json"} if content else {}
        answer = await api.http.request(method, path.replace("JOB", made["id"]), content=content, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (422, MEDIA_TYPE), answer.text
        assert answer.json()["detail"]


async def test_odd_texts_over_grpc(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, drive=False, grpc="127.0.0.1:0") as api,
        grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel,
    ):
        made = await api.submit()
        stub, headers = jobs_pb2_grpc.JobServiceStub(channel), admin(api)
        settings = jobs_pb2.ChangeSettingsRequest(id=made["id"])
        settings.changes.update({"rollout_batch_size": 1e300})
        good = jobs_pb2.SubmitRequest(job=yaml.safe_dump(job()))
        calls = [
            stub.List(jobs_pb2.ListRequest(cursor="²"), metadata=headers),
            stub.List(jobs_pb2.ListRequest(cursor="9" * 19), metadata=headers),
            stub.List(jobs_pb2.ListRequest(name="a\0b"), metadata=headers),
            stub.List(jobs_pb2.ListRequest(states=["\0"]), metadata=headers),
            stub.Get(jobs_pb2.JobRef(id="a\0b"), metadata=headers),
            stub.GetPlan(jobs_pb2.JobRef(id="a\0b"), metadata=headers),
            stub.Submit(jobs_pb2.SubmitRequest(job="x", project="\0"), metadata=headers),
            stub.Submit(good, metadata=(*headers, ("idempotency-key", "k" * 256))),
            stub.ChangeSettings(settings, metadata=headers),
        ]
        for at, call in enumerate(calls):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (at, caught.value.details())


# Uploads --------------------------------------------------------------------------------------------------------------


async def test_an_upload_that_stalls_ends_and_leaves_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, body_wait_s=0.3, grpc="127.0.0.1:0") as api:
        data = b"z" * 1000

        async def half() -> AsyncIterator[bytes]:
            yield data[:500]
            await asyncio.sleep(60)

        for path in (f"/v1/uploads/{digest(data)}", "/v1/jobs"):
            answer = await api.http.request("PUT" if "uploads" in path else "POST", path, content=half())
            assert (answer.status_code, answer.headers["content-type"]) == (408, MEDIA_TYPE)
            assert "no more of the body came" in answer.json()["detail"]

        async def chunks() -> AsyncIterator[Any]:
            yield jobs_pb2.UploadChunk(sha256=digest(data), data=data[:500])
            await asyncio.sleep(60)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await jobs_pb2_grpc.JobServiceStub(channel).Upload(chunks(), metadata=admin(api))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not [path for path in (tmp_path / "uploads").rglob(".*") if path.is_file()]
        assert (await api.http.put(f"/v1/uploads/{digest(data)}", content=data)).status_code == 201


async def test_what_a_killed_service_had_begun_is_swept_and_not_counted(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False, max_project_uploads=2000) as api:
        part = tmp_path / "uploads/default/ab" / f".{'ab' * 32}.0123abcd"
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(b"x" * 1990)
    async with serve(tmp_path, drive=False, max_project_uploads=2000) as api:
        assert not part.exists()
        data = b"y" * 1000
        assert (await api.http.put(f"/v1/uploads/{digest(data)}", content=data)).status_code == 201


async def test_uploads_that_come_at_once_share_the_room_of_their_project(tmp_path: Path) -> None:
    """Each fits by itself, all together do not."""
    async with serve(tmp_path, drive=False, max_project_uploads=10_000) as api:
        gate = asyncio.Event()

        async def slow(data: bytes) -> AsyncIterator[bytes]:
            yield data[:10]
            await gate.wait()
            yield data[10:]

        files = [bytes([65 + at]) * 3000 for at in range(8)]
        puts = [asyncio.create_task(api.http.put(f"/v1/uploads/{digest(data)}", content=slow(data))) for data in files]
        await asyncio.sleep(0.2)
        gate.set()
        codes = sorted(answer.status_code for answer in await asyncio.gather(*puts))
        kept = sum(path.stat().st_size for path in (tmp_path / "uploads").rglob("*") if path.is_file())
        assert kept <= 10_000, (codes, kept)
        assert codes[0] == 201
        assert set(codes) == {201, 413}
        # What was refused takes no room; what is removed gives it back.
        listed = (await api.http.get("/v1/uploads")).json()
        assert (listed["bytes"], listed["most_bytes"]) == (kept, 10_000)
        big = next(item for item in listed["uploads"] if item["bytes"] == 3000)
        assert (await api.http.delete(f"/v1/uploads/{big['sha256']}")).status_code == 204
        assert (await api.http.delete(f"/v1/uploads/{big['sha256']}")).status_code == 404
        more = b"m" * 3000
        assert (await api.http.put(f"/v1/uploads/{digest(more)}", content=more)).status_code == 201


async def test_a_job_keeps_its_files_when_their_uploads_are_removed(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        for item in (await api.http.get("/v1/uploads")).json()["uploads"]:
            assert (await api.http.delete(f"/v1/uploads/{item['sha256']}")).status_code == 204
        files = [path for path in (tmp_path / "runs" / made["id"] / "inputs").rglob("*") if path.is_file()]
        assert {path.name for path in files} == {"rows.jsonl", "reward.py"}
        assert all(path.stat().st_size for path in files)
        assert (await api.http.post("/v1/jobs", json=job())).status_code == 422
        actions = [entry["action"] for entry in (await api.http.get("/v1/audit")).json()["entries"]]
        assert actions.count("upload.delete") == 2


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_a_stream_ends_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Without `end`, which would say that the job is over; whoever takes it up again is refused. gRPC says it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with serve(tmp_path, grpc="127.0.0.1:0") as api:
        made = await api.submit(job(steps=100_000, step_s=0.02))
        await api.wait_step(made["id"], 1)
        access = api.service.access
        token, text = access.create_token("t", [Scope.READ], "default", time.time() + 600)
        headers = {"Authorization": f"Bearer {text}"}
        path = f"/v1/jobs/{made['id']}/events"
        stream = asyncio.create_task(
            api.http.get(path, headers=headers)
        )  # the transport gives an answer when it is whole
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            asked = jobs_pb2.EventsRequest(id=made["id"])
            call = jobs_pb2_grpc.JobServiceStub(channel).Events(asked, metadata=(("authorization", f"Bearer {text}"),))
            assert (await call.read()).kind
            if how == "revoked":
                access.revoke_token(token.id)
            else:
                api.service.access._clock = lambda: time.time() + 3600

            async def rest() -> None:
                while await call.read() is not grpc.aio.EOF:
                    pass

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(rest(), 60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await asyncio.wait_for(stream, 60)
        assert answer.status_code == 200
        assert "event: step" in answer.text
        assert "event: end" not in answer.text
        assert (await api.http.get(path, headers=headers)).status_code == 401
        assert api.service.streams == 0
        await api.http.post(f"/v1/jobs/{made['id']}/cancel")
        await api.wait(made["id"], "cancelled")


@pytest.mark.parametrize("wrong", ["-1", "1.5", "0x10", "²", "9" * 19, "abc", " ", "1,2"])
async def test_an_event_id_that_is_none_is_refused(tmp_path: Path, wrong: str) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        headers = {"Last-Event-ID": wrong.encode("latin-1")}
        answer = await api.http.get(f"/v1/jobs/{made['id']}/events?follow=false", headers=headers)
        assert answer.status_code == 422 or (wrong == " " and answer.status_code == 200), answer.text


async def test_an_event_id_that_no_event_has_goes_on_at_the_next_whole_event(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        path = f"/v1/jobs/{made['id']}/events?follow=false"
        whole = (await api.http.get(path)).text
        events = tmp_path / "runs" / made["id"] / "events.jsonl"
        with events.open("ab") as file:
            file.write(b'{"kind": "note", "time": 1.0, "text": "\xff\x00 odd"}\n{"kind": "half')
        for offset in (0, 1, 2, 10**17):
            answer = await api.http.get(path, headers={"Last-Event-ID": str(offset)})
            assert answer.status_code == 200
            for line in answer.text.splitlines():
                if line.startswith("data: "):
                    json.loads(line.removeprefix("data: "))
        assert "queued" in whole


# Callers --------------------------------------------------------------------------------------------------------------


async def test_who_guesses_tokens_does_it_at_the_rate_of_one_caller(tmp_path: Path) -> None:
    """Each guess is another token; and what is answered to anybody makes no guess a good one."""
    async with serve(tmp_path, drive=False, requests_per_s=0.01, burst=20, grpc="127.0.0.1:0") as api:
        codes = []
        for at in range(30):
            headers = {"Authorization": f"Bearer ns_guess_{at}{'x' * 50_000}"}
            assert (await api.http.get("/healthz", headers=headers)).status_code == 200
            codes.append((await api.http.get("/v1/jobs", headers=headers)).status_code)
        assert codes[0] == 401
        assert codes[-1] == 429
        assert codes.count(401) <= 20
        assert (await api.http.get("/v1/jobs")).status_code == 200, "who has a token is answered"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel:
            stub = jobs_pb2_grpc.JobServiceStub(channel)
            told = []
            for at in range(30):
                metadata = (("authorization", f"Bearer ns_guess_{at}"),)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.List(jobs_pb2.ListRequest(), metadata=metadata)
                told.append(caught.value.code())
            assert (told[0], told[-1]) == (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    "head", ["PUT /v1/uploads/{sha}", "POST /v1/jobs", "POST /v1/tokens", "POST /v1/jobs/x/session"]
)
def test_a_connection_that_ends_within_a_body_is_no_error_of_the_service(tmp_path: Path, head: str) -> None:
    sha = digest(b"x" * 1000)
    with Up(tmp_path / "data") as up:
        token = (up.folder / "admin-token").read_text().strip()
        host, _, port = up.url.removeprefix("http://").partition(":")
        lines = [
            f"{head.format(sha=sha)} HTTP/1.1",
            f"Authorization: Bearer {token}",
            "Host: x",
            "Content-Length: 1000",
        ]
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall("\r\n".join([*lines, "", "x" * 500]).encode())
            time.sleep(0.3)  # until it waits for the rest; too early tests nothing, and fails nothing
        deadline = time.monotonic() + 60
        while 'status="400"' not in (text := httpx.get(f"{up.url}/metrics").text):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        assert 'status="500"' not in text
        assert "Traceback" not in (tmp_path / "up.log").read_text()
        assert not [path for path in (up.folder / "uploads").rglob(".*") if path.is_file()]


async def test_more_calls_than_are_answered_at_one_time_are_refused_over_grpc_too(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, drive=False, max_requests=3, grpc="127.0.0.1:0") as api,
        grpc.aio.insecure_channel(f"127.0.0.1:{api.service.grpc_port}") as channel,
    ):
        made = await api.submit()
        stub, headers = jobs_pb2_grpc.JobServiceStub(channel), admin(api)
        streams = [stub.Events(jobs_pb2.EventsRequest(id=made["id"]), metadata=headers) for _ in range(3)]
        for stream in streams:
            assert (await stream.read()).kind == "state"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Get(jobs_pb2.JobRef(id=made["id"]), metadata=headers)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert (await stub.Get(jobs_pb2.JobRef(id=made["id"]), metadata=headers)).id == made["id"]
                break
            except grpc.aio.AioRpcError:
                assert time.monotonic() < deadline, "streams that are cancelled are counted no more"
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "status"), [(OperationalError, 503), (InterfaceError, 503), (DataError, 500), (IntegrityError, 500)]
)
def test_a_value_that_a_database_refuses_is_not_told_as_its_absence(kind: Any, status: int) -> None:
    assert answer("/v1/jobs", kind("SELECT", {}, Exception("the driver's words"))).status_code == status
