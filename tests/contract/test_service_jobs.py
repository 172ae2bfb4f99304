"""The life of jobs through the API, with a process that plays them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import tarfile
import time
from pathlib import Path

import httpx
import pytest

from nightshift.wire.events import read_events
from orchestrator.jobs.process import read_identity
from orchestrator.store.access import Scope
from tests.fakes.service import job, serve

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def run_dir(api, made) -> Path:
    return Path(api.service.jobs.get(made["id"]).run_dir)


async def test_a_job_from_submission_to_its_checkpoint(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit()
        assert made["state"] == "queued"
        done = await api.wait(made["id"], "succeeded")
        assert (done["step"], done["steps"], done["exit_code"], done["error"]) == (3, 3, 0, "")
        base = f"/v1/jobs/{made['id']}"
        history = (await api.http.get(f"{base}/metrics-history", params={"name": "reward/mean"})).json()
        assert [point["metrics"] for point in history["points"]] == [{"reward/mean": at / 3} for at in (1, 2, 3)]
        ledger = (await api.http.get(f"{base}/ledger")).json()
        assert (ledger["issued"], ledger["trained"], ledger["balanced"]) == (3, 3, True)
        (checkpoint,) = (await api.http.get(f"{base}/checkpoints")).json()["checkpoints"]
        assert checkpoint["step"] == 3
        response = await api.http.get(f"{base}/checkpoints/3/archive")
        assert int(response.headers["content-length"]) == len(response.content)
        with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
            assert archive.getnames() == ["global_step_3/config.json", "global_step_3/model.safetensors"]
            extracted = archive.extractfile("global_step_3/model.safetensors")
            assert extracted is not None
            assert extracted.read() == b"w" * 1500
        part = await api.http.get(f"{base}/checkpoints/3/files/config.json", headers={"Range": "bytes=0-3"})
        assert (part.status_code, len(part.content)) == (206, 4)
        assert (await api.http.get(f"{base}/checkpoints/9/archive")).status_code == 404
        assert "job" in [item["role"] for item in (await api.http.get(f"{base}/logs")).json()["logs"]]
        assert (await api.http.get(f"{base}/logs/job")).status_code == 200
        assert (await api.http.get(f"{base}/report")).json()["run_id"] == made["id"]
        states = [
            event["state"] for event in read_events(run_dir(api, made) / "events.jsonl") if event["kind"] == "state"
        ]
        assert states == ["queued", "starting", "running", "succeeded"]


async def test_rollouts_are_filtered_sorted_and_paged(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit()
        await api.wait(made["id"], "succeeded")
        path = f"/v1/jobs/{made['id']}/rollouts"
        page = (await api.http.get(path, params={"sort": "-reward", "limit": 2})).json()
        assert page["total"] == 12
        assert [row["sample_id"] for row in page["rollouts"]] == ["g3.3", "g3.2"]
        assert page["rollouts"][0]["prompt"] == "question 3"
        assert page["rollouts"][0]["response"] == "answer 3"
        second = (await api.http.get(path, params={"sort": "-reward", "limit": 2, "offset": 2})).json()
        assert [row["sample_id"] for row in second["rollouts"]] == ["g3.1", "g3.0"]
        few = (await api.http.get(path, params={"step": 1, "min_reward": 1.15, "sort": "response_tokens"})).json()
        assert [row["sample_id"] for row in few["rollouts"]] == ["g1.2", "g1.3"]
        assert (await api.http.get(path, params={"step": 77})).json() == {"total": 0, "rollouts": []}
        trace_id = page["rollouts"][0]["trace_id"]
        trace = (await api.http.get(f"/v1/traces/{trace_id}")).json()
        assert (trace["job"], trace["entries"][0]["name"]) == (made["id"], "group")
        assert (await api.http.get(f"/v1/traces/{'b' * 32}")).status_code == 404


async def test_pause_resume_cancel_resume_and_delete(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit(job(steps=400, step_s=0.02))
        base = f"/v1/jobs/{made['id']}"
        await api.wait(made["id"], "running")
        await api.wait_step(made["id"], 2)
        asked = (await api.http.post(f"{base}/pause")).json()
        assert asked["pausing"] or asked["state"] == "paused"
        paused = await api.wait(made["id"], "paused")
        assert paused["exit_code"] == 130
        assert (await api.http.post(f"{base}/resume")).json()["state"] == "resuming"
        await api.wait(made["id"], "running")
        refused = await api.http.delete(base)
        assert (refused.status_code, refused.json()["state"]) == (409, "running")
        assert (await api.http.post(f"{base}/cancel")).json()["state"] == "cancelling"
        await api.wait(made["id"], "cancelled")
        starts = [line.split() for line in (run_dir(api, made) / "starts.txt").read_text().splitlines()]
        assert len(starts) == 2
        assert int(starts[1][1]) >= 2, "it went on from its checkpoint"
        assert int(starts[1][2]) > int(starts[0][2]), "with a greater token"
        assert (await api.http.post(f"{base}/resume")).json()["state"] == "resuming"
        await api.wait(made["id"], "running")
        await api.http.post(f"{base}/cancel")
        await api.wait(made["id"], "cancelled")
        folder = run_dir(api, made)
        assert (await api.http.delete(base)).status_code == 204
        assert not folder.exists()
        assert (await api.http.get(base)).status_code == 404


async def test_a_job_that_fails_says_why_and_can_be_resumed(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit(job(fails=True))
        failed = await api.wait(made["id"], "failed")
        assert failed["error"] == "[reward] it went wrong. Mend it"
        assert failed["exit_code"] == 1
        assert (await api.http.post(f"/v1/jobs/{made['id']}/resume")).json()["error"] == ""


async def test_a_killed_job_takes_nobody_down_and_goes_on(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        one = await api.submit(job("one", steps=400, step_s=0.02))
        two = await api.submit(job("two", steps=100, step_s=0.02))
        for made in (one, two):
            await api.wait(made["id"], "running")
            await api.wait_step(made["id"], 1)
        pid = int((run_dir(api, one) / "starts.txt").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        await api.wait(one["id"], "resuming", "starting")
        await api.wait(one["id"], "running")
        await api.wait(two["id"], "succeeded")
        assert len((run_dir(api, one) / "starts.txt").read_text().splitlines()) == 2
        assert len((run_dir(api, two) / "starts.txt").read_text().splitlines()) == 1
        await api.http.post(f"/v1/jobs/{one['id']}/cancel")
        await api.wait(one["id"], "cancelled")


async def test_a_service_that_starts_again_takes_its_jobs_over(tmp_path: Path) -> None:
    async with serve(tmp_path, at_once=1) as api:
        running = await api.submit(job("one", steps=60, step_s=0.05))
        queued = await api.submit(job("two"))
        await api.wait(running["id"], "running")
        before = read_identity(run_dir(api, running))
    assert before is not None
    assert before.alive, "jobs outlive the service"
    async with serve(tmp_path, at_once=1) as api:
        await api.wait_step(running["id"], 5)
        assert read_identity(run_dir(api, running)) == before, "the same process"
        assert (await api.http.get(f"/v1/jobs/{queued['id']}")).json()["state"] == "queued"
        await api.wait(running["id"], "succeeded")
        await api.wait(queued["id"], "succeeded")
        assert len((run_dir(api, running) / "starts.txt").read_text().splitlines()) == 1


async def test_what_ended_while_no_service_ran_is_seen_afterwards(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        good = await api.submit(job("good", steps=10, step_s=0.05))
        killed = await api.submit(job("killed", steps=300, step_s=0.02))
        for made in (good, killed):
            await api.wait(made["id"], "running")
        await api.wait_step(killed["id"], 1)
        keeper = read_identity(run_dir(api, killed))
        folder = run_dir(api, killed)
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)  # with it goes what it started
    await asyncio.sleep(1.5)
    async with serve(tmp_path) as api:
        assert (await api.wait(good["id"], "succeeded"))["step"] == 10
        deadline = time.monotonic() + 30
        while len((folder / "starts.txt").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "it was not started again"
            await asyncio.sleep(0.05)
        await api.wait(killed["id"], "running")
        await api.http.post(f"/v1/jobs/{killed['id']}/cancel")
        await api.wait(killed["id"], "cancelled")


async def test_two_hundred_submissions_at_once_are_all_queued_once(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:

        async def submit(at: int) -> tuple[int, str]:
            headers = {"Idempotency-Key": f"key-{at % 200}"}
            response = await api.http.post("/v1/jobs", json=job(f"job-{at % 200}"), headers=headers)
            return response.status_code, response.json()["id"]

        answers = await asyncio.gather(*(submit(at) for at in range(400)))
        assert sorted(status for status, _ in answers) == [200] * 200 + [201] * 200
        assert len({job_id for _, job_id in answers}) == 200
        names: list[str] = []
        cursor = None
        while True:
            page = (
                await api.http.get("/v1/jobs", params={"limit": 70, **({"cursor": cursor} if cursor else {})})
            ).json()
            names += [item["name"] for item in page["jobs"]]
            cursor = page["next"]
            if cursor is None:
                break
        assert sorted(names) == sorted(f"job-{at}" for at in range(200))
        assert len(list((tmp_path / "runs").iterdir())) == 200


async def test_priorities_and_quotas(tmp_path: Path) -> None:
    async with serve(tmp_path, at_once=1, drive=False) as api:
        low = await api.submit(job("low", steps=1))
        high = await api.submit(job("high", steps=1), params={"priority": 5})
        await api.http.put("/v1/projects/small", json={"max_running": 0, "max_waiting": 1})
        team = api.token(Scope.SUBMIT, Scope.CODE, project="small")
        await api.upload(team)
        never = await api.submit(job("never"), headers=team)
        full = await api.http.post("/v1/jobs", json=job("never"), headers=team)
        assert (full.status_code, full.headers["retry-after"]) == (429, "30")
        api.service.scheduler.start()
        for made in (low, high):
            await api.wait(made["id"], "succeeded")
        starts = {
            made["name"]: (await api.http.get(f"/v1/jobs/{made['id']}")).json()["started"] for made in (low, high)
        }
        assert starts["high"] < starts["low"]
        assert (await api.http.get(f"/v1/jobs/{never['id']}")).json()["state"] == "queued"


async def test_o46_the_callers_trace_is_the_jobs(tmp_path: Path) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with serve(tmp_path) as api:
        made = await api.submit(headers={"traceparent": trace})
        await api.wait(made["id"], "succeeded")
        assert (run_dir(api, made) / "starts.txt").read_text().split()[3] == trace
        other = await api.submit(headers={"traceparent": "nonsense"})
        await api.wait(other["id"], "succeeded")
        assert (run_dir(api, other) / "starts.txt").read_text().split()[3] == "None"


def parse(text: str) -> list[dict[str, str]]:
    blocks = text.replace("\r\n", "\n").split("\n\n")
    return [
        dict(line.split(": ", 1) for line in block.splitlines() if ": " in line) for block in blocks if block.strip()
    ]


async def test_an_event_stream_that_broke_off_goes_on_where_it_was(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit()
        path = f"/v1/jobs/{made['id']}/events"
        whole = parse((await api.http.get(path)).text)
        assert whole[-1]["event"] == "end"
        kinds = [event["event"] for event in whole]
        assert kinds[0] == "state"
        assert kinds.count("step") == 3
        for at in (0, 3, len(whole) - 2):
            rest = parse((await api.http.get(path, headers={"Last-Event-ID": whole[at]["id"]})).text)
            assert rest == whole[at + 1 :]
        middle = int(whole[2]["id"]) - 5  # no event's id: the stream goes on at the next event
        rest = parse((await api.http.get(path, params={"after": middle, "kind": "step", "follow": False})).text)
        assert [json.loads(event["data"])["step"] for event in rest if event["event"] == "step"] == [1, 2, 3]


async def test_many_streams_at_once_see_the_same(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit(job(steps=20, step_s=0.02))
        answers = await asyncio.gather(*(api.http.get(f"/v1/jobs/{made['id']}/events") for _ in range(20)))
        assert len({answer.text for answer in answers}) == 1
        assert api.service.streams == 0


async def test_jobs_live_through_a_database_that_is_away(tmp_path: Path) -> None:
    async with serve(tmp_path) as api:
        made = await api.submit(job(steps=40, step_s=0.03))
        await api.wait(made["id"], "running")
        engine, path = api.service.engine, tmp_path / "state.db"
        engine.dispose()
        for suffix in ("", "-wal", "-shm"):
            if (tmp_path / f"state.db{suffix}").exists():
                (tmp_path / f"state.db{suffix}").rename(tmp_path / f"away.db{suffix}")
        path.mkdir()  # nothing can be opened there
        refused = await api.http.post("/v1/jobs", json=job())
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:nightshift:problem:database-away")
        assert (await api.http.get("/readyz")).status_code == 503
        assert (await api.http.get("/healthz")).status_code == 200
        await asyncio.sleep(0.3)
        path.rmdir()
        for suffix in ("", "-wal", "-shm"):
            if (tmp_path / f"away.db{suffix}").exists():
                (tmp_path / f"away.db{suffix}").rename(tmp_path / f"state.db{suffix}")
        done = await api.wait(made["id"], "succeeded")
        assert done["step"] == 40
        assert isinstance(refused, httpx.Response)


async def test_settings_are_asked_for_all_or_none(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit()
        path = f"/v1/jobs/{made['id']}/settings"
        shown = (await api.http.get(path)).json()
        assert {item["key"]: item["value"] for item in shown["settings"]}["rollout.batch_size"] == 8
        assert all(item["why"] for item in shown["settings"])
        refused = await api.http.patch(path, json={"learning_rate": 1e-5, "model_size": "1b", "rollout.n": 3})
        assert refused.status_code == 422
        assert {item["field"] for item in refused.json()["errors"]} == {"model_size", "rollout.n"}
        assert (await api.http.get(path)).json()["pending"] == {}
        asked = await api.http.patch(path, json={"learning_rate": 1e-5, "use_async_rollout": False})
        assert asked.json()["pending"] == {"trainer.learning_rate": 1e-5, "pipeline.max_staleness": 0}
        # Values that were asked for count for later checks, and a change may be taken back before it takes effect.
        back = await api.http.patch(path, json={"use_async_rollout": True})
        assert back.json()["pending"] == {"trainer.learning_rate": 1e-5}
        assert (await api.http.patch(path, json={})).status_code == 422
        assert (await api.http.patch(path, json=[1])).status_code == 422
        await api.http.post(f"/v1/jobs/{made['id']}/cancel")
        late = await api.http.patch(path, json={"learning_rate": 1})
        assert (late.status_code, late.json()["state"]) == (409, "cancelled")
        actions = [entry["action"] for entry in (await api.http.get("/v1/audit")).json()["entries"]]
        assert actions.count("job.settings") == 2


async def test_a_full_disk_is_said_so_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(tmp_path, drive=False) as api:
        kept = await api.submit()
        full = OSError(errno.ENOSPC, "No space left on device")

        def refuse(*_values: object, **_named: object) -> None:
            raise full

        for target in ("nightshift.cli.runs.Path.mkdir", "orchestrator.jobs.submission.write_resolved"):
            with monkeypatch.context() as patch:
                patch.setattr(target, refuse)
                answer = await api.http.post("/v1/jobs", json=job())
                assert (answer.status_code, answer.json()["type"]) == (503, "urn:nightshift:problem:disk-full")
        assert [item["id"] for item in (await api.http.get("/v1/jobs")).json()["jobs"]] == [kept["id"]]
        assert len(os.listdir(tmp_path / "runs")) == 1  # noqa: PTH208
        assert (await api.http.post("/v1/jobs", json=job())).status_code == 201


async def test_a_job_that_is_there_is_planned_as_its_file_was(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = await api.submit(job("planned", steps=7))
        found = await api.http.get(f"/v1/jobs/{made['id']}/plan")
        assert found.status_code == 200, found.text
        plan = found.json()
        assert (plan["name"], plan["samples_per_step"]) == ("planned", 32)
        assert plan["parallelism"] == {"data": 1, "zero_stage": 2}
        before = await api.http.post("/v1/plan", json=job("planned", steps=7))
        assert before.json() == plan
        assert (await api.http.get("/v1/jobs/nosuch/plan")).status_code == 404
        other = api.token(Scope.READ, project="other")
        assert (await api.http.get(f"/v1/jobs/{made['id']}/plan", headers=other)).status_code == 404
