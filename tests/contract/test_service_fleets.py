"""Fleets of rollout servers that the jobs of a service share: the API, and real runners that get servers in turns."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nightshift.analysis.audit import audit
from nightshift.analysis.evidence import load
from nightshift.client import Client
from nightshift.wire.events import read_events
from orchestrator.store.access import Scope
from tests.fakes.run import DEFAULTS, rows
from tests.fakes.service import job, serve
from tests.fakes.shared_servers import TOKEN, SharedServers
from tests.fakes.up import Up
from tests.fixtures.rows import write_parquet
from tests.fixtures.tokenizer_k import write_folder

#: Leases of the job with the least weight, after which the shares are looked at: 40 for 5 per cent.
LEASES = int(os.environ.get("NIGHTSHIFT_FLEET_LEASES", "12"))
COMMAND = [sys.executable, "-m", "tests.fakes.session_process", "{folder}"]
SERVERS = [{"name": "a", "url": "http://127.0.0.1:9"}, {"name": "b", "url": "http://127.0.0.1:10/"}]


# The API --------------------------------------------------------------------------------------------------------------


async def test_a_fleet_is_registered_changed_and_removed(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        made = (await api.http.put("/v1/fleets/night", json={"servers": SERVERS, "hold_s": 60})).json()
        assert (made["hold_s"], [one["url"] for one in made["servers"]]) == (
            60,
            ["http://127.0.0.1:9", "http://127.0.0.1:10"],
        )
        assert (await api.http.get("/v1/fleets")).json()["fleets"] == [made]
        assert (await api.http.get("/v1/fleets/night")).json() == made
        assert (await api.http.get("/v1/fleets/night/leases")).json() == {"leases": [], "shares": [], "next": None}
        figures = (await api.http.get("/metrics")).text
        assert 'nightshift_lease_servers{fleet="night",state="away"} 2.0' in figures, "they do not answer"
        clash = await api.http.put("/v1/fleets/day", json={"servers": SERVERS[:1]})
        assert (clash.status_code, "another fleet" in clash.json()["detail"]) == (422, True)
        assert (await api.http.delete("/v1/fleets/night")).status_code == 204
        for answer in (await api.http.delete("/v1/fleets/night"), await api.http.get("/v1/fleets/night/leases")):
            assert (answer.status_code, answer.json()["detail"]) == (404, "there is no fleet 'night'")


@pytest.mark.parametrize(
    "body",
    [
        {"servers": [SERVERS[0], SERVERS[0]]},
        {"servers": SERVERS, "hold_s": -1},
        {"servers": SERVERS, "drain_s": 90, "deadline_s": 90},
        {"servers": [{"name": "a", "url": "file:///etc/passwd"}]},
        {"servers": [{"name": "a", "url": "http://h", "token_variable": "AWS_SECRET_ACCESS_KEY"}]},
        {"servers": [{"name": "../a", "url": "http://h"}]},
        {"servers": SERVERS, "unknown": 1},
    ],
)
async def test_a_wrong_fleet_is_refused_and_leaves_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serve(tmp_path, drive=False) as api:
        assert (await api.http.put("/v1/fleets/night", json=body)).status_code == 422
        assert (await api.http.get("/v1/fleets")).json() == {"fleets": []}


async def test_who_may_change_a_fleet(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        for headers in (api.token(Scope.SUBMIT), api.token(Scope.ADMIN, project="default")):
            refused = await api.http.put("/v1/fleets/night", json={"servers": SERVERS}, headers=headers)
            assert refused.status_code == 403
        await api.http.put("/v1/fleets/night", json={"servers": SERVERS})
        read = await api.http.get("/v1/fleets", headers=api.token(Scope.READ))
        assert [fleet["name"] for fleet in read.json()["fleets"]] == ["night"]
        assert (await api.http.delete("/v1/fleets/night", headers=api.token(Scope.SUBMIT))).status_code == 403


async def test_a_job_that_names_a_fleet_which_is_not_there_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, drive=False) as api:
        wanted = job(rollout={"fleet": "night"})
        refused = await api.http.post("/v1/jobs", json=wanted)
        assert refused.status_code == 422
        assert "'night', and there is no such fleet: this service has none" in refused.json()["detail"]
        await api.http.put("/v1/fleets/night", json={"servers": SERVERS})
        made = await api.submit(wanted)
        assert made["spec"]["rollout"]["fleet"] == {
            "name": "night", "weight": 1.0, "min_servers": 0, "max_servers": None, "max_wait_s": 3600.0
        }  # fmt: skip
        for wrong in ({"fleet": {"name": "night", "weight": 0}}, {"fleet": "night", "url": "http://h"}):
            assert (await api.http.post("/v1/jobs", json=job(rollout=wrong))).status_code == 422


def test_fleets_of_a_file_are_there_when_the_service_is(tmp_path: Path) -> None:
    path = tmp_path / "fleets.yaml"
    path.write_text("night:\n  servers: [{name: a, url: 'http://127.0.0.1:9'}]\n  hold_s: 60\n")
    with Up(tmp_path / "data", "--fleets", str(path)) as up:
        shown = up.cli("fleets")
        assert "night: 1 servers, 0 lent" in shown
        assert "free, does not answer" in shown
        assert "weight" in up.cli("fleets", "night")
        assert "there is no fleet 'day'" in up.cli("fleets", "day", code=2)
    path.write_text("night: {servers: [{name: a}]}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "nightshift.cli.main", "up", "--data-dir", str(up.folder)),
            *("--port", "0", "--fleets", str(path)),
        ],
        env=up.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "night.servers.0.url" in done.stderr


# Real runners ---------------------------------------------------------------------------------------------------------


def fleet_job(folder: Path, name: str, *, steps: int, **fleet: Any) -> dict[str, Any]:
    """A job on shared servers, with toy data and model."""
    document = {key: dict(value) if isinstance(value, dict) else value for key, value in DEFAULTS.items()}
    document["name"] = name
    document["rewards"] = [{"function": str(folder / "reward.py:wanted"), "name": "wanted"}]
    document["model"] = {"path": str(folder / "model")}
    document["data"] = {**document["data"], "train_files": [str(folder / "train.parquet")]}
    document["rollout"] = {**document["rollout"], "flush_tokens": 2, "fleet": {"name": "night", **fleet}}
    document["trainer"] = {**document["trainer"], "total_steps": steps, "total_epochs": 10_000, "save_freq": 50}
    # Three jobs and the service on a small machine: none of them is to fail because it stood still for a while.
    document["rollout"]["request_timeout_s"] = document["trainer"]["update_timeout_s"] = 120.0
    document["scorers"] = {**document["scorers"], "timeout_s": 120.0}
    document["pipeline"] = {**document["pipeline"], "role_timeout_s": 120.0}
    return document


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model, data and reward, in a folder that the service may read."""
    monkeypatch.setenv("NIGHTSHIFT_ROLLOUT_TOKEN", TOKEN)
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "reward.py").write_text("def wanted(response):\n    return 0.0\n")
    write_folder(folder / "model")
    write_parquet(folder / "train.parquet", rows(24))
    return folder


def wait_for(
    condition: Callable[[], Any], what: str, limit_s: float = 120.0, *, state: Callable[[], Any] = lambda: ""
) -> None:
    """Waits; what it found instead is said with ``state``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}\n{state()}"
        time.sleep(0.2)


def told(client: Client) -> str:
    """Jobs, shares and the newest leases, for the message of a wait that was in vain."""
    jobs = [(job.name, job.state, job.step, job.error) for job in client.jobs()]
    found = client.leases("night", limit=20)
    return "\n".join(map(str, [time.time(), *jobs, *client.fleets(), *found["shares"], *found["leases"]]))


def all_leases(client: Client, fleet: str = "night") -> list[dict[str, Any]]:
    """All leases, the newest first."""
    found: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        page = client.leases(fleet, before=before, limit=1000)
        found += page["leases"]
        if (before := page["next"]) is None:
            return found


def check_run(run_dir: Path, logs: Path) -> int:
    """Audits a run with the shared servers' request logs; returns the tokens that it stored."""
    for log in logs.glob("requests-*.jsonl"):
        shutil.copy(log, run_dir / "logs" / log.name)
    found = audit(load(run_dir))
    assert found.balanced, "\n".join(f"{one.kind} {one.subject}: {one.message}" for one in found.findings[:20])
    versions = {
        version
        for path in (run_dir / "rollouts").glob("*.parquet")
        for row in pq.read_table(path, columns=["versions"]).to_pylist()
        for version in row["versions"]
    }
    assert versions
    assert all(version.startswith(f"{run_dir.name}/") for version in versions), "a token of another job's weights"
    return found.tokens


def wanting(client: Client) -> int:
    return sum(share["wants"] for share in client.leases("night")["shares"])


def further_leases(client: Client, *, since: float, job_id: str | None = None) -> int:
    """Leases that were granted since and have ended: of a job, or of all."""
    assert not [job for job in client.jobs() if job.state in ("failed", "succeeded")], told(client)
    found = [lease for lease in all_leases(client) if lease["ended"] and lease["since"] > since]
    return sum(job_id in (None, lease["job_id"]) for lease in found)


def check_no_overlap(leases: list[dict[str, Any]]) -> None:
    by_server: dict[str, list[dict[str, Any]]] = {}
    for lease in sorted(leases, key=lambda one: one["number"]):
        by_server.setdefault(lease["server"], []).append(lease)
    for mine in by_server.values():
        for earlier, later in pairwise(mine):
            assert earlier["ended"] is not None
            assert earlier["ended"] <= later["since"]


@pytest.mark.timeout(1200)
def test_three_jobs_share_four_servers_by_weight(inputs: Path, tmp_path: Path) -> None:
    """Weights 1:2:3, over so many leases that two more or less are no matter. Then the service is killed."""
    weights = {"one": 1.0, "two": 2.0, "three": 3.0}
    arguments = ("--at-once", "3", "--allow-path", str(inputs), "--tick-s", "0.1")
    with SharedServers(tmp_path / "fleet", 4) as shared, Up(tmp_path / "data", *arguments, command=COMMAND) as up:
        with up.client() as client:
            client.put_fleet("night", shared.servers, hold_s=0.5, switch_s=0.05, drain_s=0.2, deadline_s=60.0)
            ids = {
                name: client.submit(fleet_job(inputs, name, steps=100_000, weight=weight)).id
                for name, weight in weights.items()
            }
            wait_for(lambda: wanting(client) == 3, "three jobs that want servers", state=lambda: told(client))
            began = time.time()
            smallest = ids["one"]
            wait_for(
                lambda: further_leases(client, since=began, job_id=smallest) >= LEASES,
                f"{LEASES} leases of it", 900.0, state=lambda: told(client),
            )  # fmt: skip
            until = time.time()
            leases = all_leases(client)
            seconds: Counter[str] = Counter()
            for lease in leases:
                end = lease["ended"] if lease["ended"] is not None else until
                seconds[lease["job_id"]] += max(0.0, end - max(lease["since"], began))
            got = {name: seconds[job_id] / seconds.total() for name, job_id in ids.items()}
            print({name: f"{share:.2%}" for name, share in got.items()}, f"{seconds.total():.0f} server-seconds")
            for name, weight in weights.items():
                assert got[name] == pytest.approx(weight / 6, rel=2 / LEASES)

        up.kill()
        up.start()
        with up.client() as client:
            back, before = time.time(), {job.id: job.step for job in client.jobs()}
            # Not of each job: what the third one is owed is two whole servers, and it may well keep the same two.
            wait_for(
                lambda: further_leases(client, since=back) >= 6,
                "further leases", 400.0, state=lambda: told(client),
            )  # fmt: skip
            wait_for(
                lambda: all(job.step > before[job.id] for job in client.jobs()),
                "a further step of each job", 400.0, state=lambda: told(client),
            )  # fmt: skip
            leases = all_leases(client)
            assert {lease["ended_why"] for lease in leases} == {"", "returned"}, "the restart took nothing away"
            assert any(lease["since"] < back < (lease["ended"] or back + 1) for lease in leases)
            for job_id in ids.values():
                client.cancel(job_id)
            for job_id in ids.values():
                client.wait(job_id, 120)
        assert up.cli("fleets", "--json").count('"lent": false') == 4, "what has ended holds nothing"
        assert json.loads(up.cli("fleets", "night", "--json"))["shares"] == []
        with up.client() as client:
            check_no_overlap(all_leases(client))
            client.delete_fleet("night")
        for job_id in ids.values():
            assert check_run(up.folder / "runs" / job_id, shared.folder) > 0


@pytest.mark.timeout(1200)
def test_kill_9_with_ten_jobs_on_three_servers(inputs: Path, tmp_path: Path) -> None:
    """Real runners; some work and some wait, and the process of one is killed beside the service."""
    arguments = ("--at-once", "3", "--allow-path", str(inputs))
    with SharedServers(tmp_path / "fleet", 3) as shared, Up(tmp_path / "data", *arguments, command=COMMAND) as up:
        with up.client() as client:
            client.put_fleet("night", shared.servers, hold_s=1.0, switch_s=0.1, drain_s=0.2, deadline_s=60.0)
            ids = [client.submit(fleet_job(inputs, f"job-{at}", steps=30)).id for at in range(10)]
            wait_for(lambda: sum(found.step > 0 for found in client.jobs()) >= 2, "two jobs that work")
        up.kill()
        victim = next(
            folder
            for folder in (up.folder / "runs").iterdir()
            if (folder / "process.json").exists() and not (folder / "exit.json").exists()
        )
        os.killpg(json.loads((victim / "process.json").read_text())["pid"], signal.SIGKILL)
        up.start()
        with up.client() as client:
            for job_id in ids:
                done = client.wait(job_id, 300)
                assert (done.state, done.step) == ("succeeded", 30), done.error
                ledger = client.ledger(job_id)
                assert ledger["balanced"]
            leases = all_leases(client)
        check_no_overlap(leases)
        assert {lease["job_id"] for lease in leases} == set(ids)
        starts = [event for event in read_events(victim / "events.jsonl") if event.get("state") == "starting"]
        assert len([event for event in starts if event["kind"] == "job"]) == 2, "its run was taken up again"
        for job_id in ids:
            check_run(up.folder / "runs" / job_id, shared.folder)
