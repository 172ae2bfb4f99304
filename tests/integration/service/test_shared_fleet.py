"""Two real jobs with different policies share one real vLLM server: it is lent to them in turns, each pushes its own
weights to it, and no token of one job is drawn from the other one's."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from nightshift.config.load import load_job
from nightshift.wire.lease_fence import HEADER, LEASE_OVER, LeaseFence
from services.rollout.launch import VllmServer
from tests.fakes.up import Up
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import leftovers, write_job
from tests.integration.service.test_two_jobs import _OTHER, _SAME, distance, rows_of

pytestmark = pytest.mark.integration
STEPS = 20


def test_one_server_works_for_two_jobs_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [build_tiny_model(tmp_path / f"model-{seed}", seed) for seed in (0, 1)]
    jobs = [
        write_job(
            tmp_path / f"mine-{at}", model, name=f"job-{at}",
            rollout={"dtype": "float32", "fleet": "night", "flush_tokens": 4},
            pipeline={"max_staleness": 1, "deterministic": False},
            trainer={"total_steps": STEPS, "seed": at, "test_freq": 0},
            rewards=[{"function": f"reward.py:{('score', 'inverted')[at]}"}],
        )
        for at, model in enumerate(models)
    ]  # fmt: skip
    server = VllmServer(
        load_job(jobs[0]),
        store=None,
        log_path=tmp_path / "fleet" / "vllm.log",
        cores=sorted(os.sched_getaffinity(0))[:1],
        weights_url="http://127.0.0.1",  # of whichever job has it
        cache=tmp_path / "fleet" / "weights",
        name="s0",
    )
    (tmp_path / "fleet").mkdir()
    server.spawn()
    try:
        server.wait_ready()
        monkeypatch.setenv("NIGHTSHIFT_ROLLOUT_TOKEN", server.token)
        allowed = (part for model in models for part in ("--allow-path", str(model)))
        with Up(tmp_path / "data", "--at-once", "2", *allowed, command=None) as up, up.client() as client:
            terms = {"hold_s": 2.0, "switch_s": 0.1, "drain_s": 1.0, "deadline_s": 120.0}
            client.put_fleet("night", [{"name": "s0", "url": server.url}], **terms)
            made = [client.submit(job).id for job in jobs]
            for job_id in made:
                job = client.wait(job_id, 600)
                assert job.state == "succeeded", f"{job.error}: {client.logs(job.id, 'job')[-2000:]}"
                assert job.step == STEPS
            # What the jobs sent it has told the server of their leases: it is fenced against all but the newest.
            headers = {"Authorization": f"Bearer {server.token}", HEADER: str(LeaseFence(0, 1))}
            late = httpx.post(f"{server.url}/pause", headers=headers, timeout=60)
            assert (late.status_code, late.json()["error"]["type"]) == (409, LEASE_OVER), late.text
            assert httpx.get(f"{server.url}/nightshift/v1/info", headers=headers, timeout=60).status_code == 200
            leases = client.leases("night")["leases"][::-1]
            holders = [lease["job_id"] for lease in leases]
            print(len(leases), "leases,", sum(one != two for one, two in pairwise(holders)), "changes of jobs")
            # How often it goes to and fro depends on when the second job is up, and on the machine.
            assert set(holders) == set(made)
            for earlier, later in pairwise(leases):
                assert earlier["ended"] <= later["since"]
            for at, job_id in enumerate(made):
                run_dir = up.folder / "runs" / job_id
                rows = rows_of(run_dir)
                assert len(rows) == STEPS * 2 * 4
                assert {version.split("/")[0] for row in rows for version in row["versions"]} == {job_id}
                first = [row for row in rows if [version.rsplit("/", 1)[1] for version in row["versions"]] == ["0"]]
                assert first
                assert distance(models[at], first) < _SAME
                assert distance(models[1 - at], first) > _OTHER, "the other job's policy would be seen"
                assert client.ledger(job_id)["balanced"]
                assert "balanced" in up.cli("audit", str(run_dir))
    finally:
        server.stop()
    deadline = time.monotonic() + 60
    while (left := [item for job_id in made for item in leftovers(job_id)]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
