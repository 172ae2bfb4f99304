"""The service as a process of its own on loopback: its client, its command line, and what a kill -9 costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from nightshift.cli import completion
from nightshift.cli.main import app
from nightshift.client import Client, ServiceError
from nightshift.config.load import load_job
from nightshift.wire.errors import BadInputError
from orchestrator.api.__main__ import is_loopback
from tests.fakes.service import REWARD, ROWS
from tests.fakes.up import Up


def write_job(folder: Path, name: str = "tiny", steps: int = 3, step_s: float = 0.01, **more: Any) -> Path:
    """A job file with its data and reward beside it, as a user has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_bytes(ROWS)
    (folder / "reward.py").write_bytes(REWARD)
    job = {
        "name": name,
        "model": {"path": "builtin:smollm2-135m-instruct"},
        "data": {"train_files": ["rows.jsonl"]},
        "rewards": [{"function": "reward.py:score"}],
        "rollout": {"request_timeout_s": step_s},
        "trainer": {"total_steps": steps},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_a_job_from_a_folder_that_the_service_cannot_see(tmp_path: Path) -> None:
    job = write_job(tmp_path / "mine")
    with Up(tmp_path / "data") as up, up.client() as client:
        made = client.submit(job, ["trainer.total_steps=4"], priority=3)
        for path in (tmp_path / "mine").iterdir():
            path.unlink()
        assert (made.state, made.priority, made.submitter) == ("queued", 3, "admin")
        done = client.wait(made.id, 120)
        assert (done.state, done.step) == ("succeeded", 4)
        assert done.spec is not None
        assert done.spec["data"]["train_files"][0].startswith(str(tmp_path / "data"))
        kinds = [event.kind for event in client.events(made.id)]
        assert kinds.count("step") == 4
        assert [point["step"] for point in client.metrics(made.id)] == [1, 2, 3, 4]
        assert client.ledger(made.id)["balanced"]
        assert len(client.rollouts(made.id, step=2, sort="-reward")) == 4
        folder = client.export(made.id, tmp_path / "out")
        assert json.loads((folder / "config.json").read_text()) == {"step": 4}
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        with pytest.raises(BadInputError, match="not an empty folder"):
            client.export(made.id, tmp_path / "out")
        with pytest.raises(BadInputError, match="of step 9: 4"):
            client.export(made.id, tmp_path / "other", step=9)
        assert client.find(made.id[:10]).id == made.id
        client.delete(made.id)
        assert list(client.jobs()) == []
        with pytest.raises(ServiceError) as caught:
            client.get(made.id)
        assert (caught.value.status, caught.value.exit_code) == (404, 2)


def test_the_same_key_makes_one_job_and_pages_follow_each_other(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path / "mine"), check_files=False)
    with Up(tmp_path / "data", "--at-once", "0") as up, up.client() as client:
        ids = [client.submit(job, idempotency_key=f"k{at // 2}").id for at in range(10)]
        assert len(set(ids)) == 5
        assert [found.id for found in client.jobs(page=2)] == list(dict.fromkeys(ids))[::-1]
        assert list(client.jobs(states=["running", "failed"])) == []


def test_kill_9_with_ten_jobs(tmp_path: Path) -> None:
    """Some run, some wait; a process of one dies meanwhile. All end as they would have, each step made once."""
    with Up(tmp_path / "data", "--at-once", "4") as up, up.client() as client:
        job = load_job(write_job(tmp_path / "mine", steps=40, step_s=0.05), check_files=False)
        ids = [client.submit(job, idempotency_key=str(at)).id for at in range(10)]
        deadline = time.monotonic() + 60
        while sum(found.state == "running" and found.step > 1 for found in client.jobs()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        up.kill()
        victim = next(
            Path(up.folder / "runs" / job_id) for job_id in ids if (up.folder / "runs" / job_id / "starts.txt").exists()
        )
        pid = int((victim / "starts.txt").read_text().split()[0])
        subprocess.run(["kill", "-9", str(pid)], check=True)
        up.start()
        with up.client() as again:
            job_states = {found.id: found.state for found in again.jobs()}
            assert set(job_states) == set(ids)
            assert again.submit(job, idempotency_key="3").id == ids[3], "keys are remembered"
            for job_id in ids:
                assert again.wait(job_id, 120).state == "succeeded"
                ledger = again.ledger(job_id)
                assert (ledger["issued"], ledger["trained"], ledger["balanced"]) == (40, 40, True)
        starts = {job_id: (up.folder / "runs" / job_id / "starts.txt").read_text().splitlines() for job_id in ids}
        assert len(starts[victim.name]) == 2
        assert [len(lines) for job_id, lines in starts.items() if job_id != victim.name] == [1] * 9


def test_the_command_line(tmp_path: Path) -> None:
    job = write_job(tmp_path / "mine")
    with Up(tmp_path / "data") as up:
        job_id = up.cli("submit", str(job), "trainer.total_steps=2").strip()
        assert "step 2/2" in up.cli("watch", job_id)
        shown = json.loads(up.cli("show", job_id, "--json"))
        assert (shown["state"], shown["step"]) == ("succeeded", 2)
        assert job_id in up.cli("list")
        assert json.loads(up.cli("ledger", job_id, "--json"))["balanced"]
        assert "answer 3" in up.cli("rollouts", job_id, "--step", "1")
        assert up.cli("export", job_id, str(tmp_path / "out")).strip() == str(tmp_path / "out")
        folder = str(up.folder / "runs" / job_id)  # read where it lies, it says the same
        trace = json.loads(up.cli("rollouts", job_id, "--step", "1", "--json").splitlines()[0])["trace_id"]
        for as_json in ([], ["--json"]):
            assert up.cli("report", job_id, *as_json) == up.cli("report", folder, *as_json)
            told = up.cli("trace", trace, *as_json, "--run", folder)
            assert up.cli("trace", trace, *as_json) == up.cli("trace", trace, *as_json, "--run", job_id) == told
        assert "fits 2 traces" in up.cli("trace", trace[:8], code=2)
        assert up.cli("ledger", job_id).splitlines()[-1] == "balanced"
        assert up.cli("rollouts", job_id, "--step", "1") == up.cli("rollouts", folder, "--step", "1")
        exported = json.loads(up.cli("export", job_id, str(tmp_path / "other"), "--json"))
        assert exported == {"folder": str(tmp_path / "other"), "step": 2}
        logs = [json.loads(line)["role"] for line in up.cli("logs", job_id, "--json").splitlines()]
        assert "job" in logs
        assert {json.loads(line)["role"] for line in up.cli("logs", job_id, "job", "--json").splitlines()} <= {"job"}
        assert "job" in up.cli("logs", job_id)
        assert "succeeded" in up.cli("pause", job_id, code=2)
        assert "there is no job" in up.cli("show", "nosuch", code=2)
        long = up.cli("submit", str(write_job(tmp_path / "mine", "long", 500, 0.05))).strip()
        assert up.cli("cancel", long[:8]).strip().startswith(long)
        assert "wrong" not in up.cli("submit", str(job), "trainer.total_steps=1", "--wait")
        offered = [name for name, _ in completed_jobs(up, long[:6])]
        assert offered == [long]
        token = up.cli("token", "ci", "--scope", "read", "--project", "default").strip()
        with Client(up.url, token) as reader, pytest.raises(ServiceError, match="no scope 'submit'"):
            reader.cancel(long)
        with up.client() as client:
            client.wait(long, 120)
        assert "deleted" in up.cli("delete", long)


def completed_jobs(up: Up, beginning: str) -> list[tuple[str, str]]:
    """What a shell offers for a job's id."""
    context = typer.Context(typer.main.get_command(app))
    context.params = {"url": up.url}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NIGHTSHIFT_DATA_DIR", str(up.folder))
        return completion.jobs(context, beginning)


def test_a_service_that_is_away_completes_nothing() -> None:
    context = typer.Context(typer.main.get_command(app))
    context.params = {"url": "http://127.0.0.1:9"}
    assert completion.jobs(context, "") == []


def test_a_second_service_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with Up(tmp_path / "data") as up:
        second = subprocess.run(
            [sys.executable, "-m", "orchestrator.api", "--data-dir", str(up.folder), "--port", "0"],
            env=up.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert second.returncode == 2
        assert "another service uses" in second.stderr


@pytest.mark.parametrize("arguments", [["--host", "0.0.0.0", "--no-token"], ["--host", "192.0.2.1"]])
def test_what_the_service_does_not_start_with(tmp_path: Path, arguments: list[str]) -> None:
    """Without tokens for everybody; on an address that no machine has."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.api", "--data-dir", str(tmp_path), "--port", "0", *arguments],
        capture_output=True, text=True, timeout=60, env=Up(tmp_path).environment,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x.y", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_service_that_is_not_there_is_said_so() -> None:
    with Client("http://127.0.0.1:9", "x") as client, pytest.raises(ServiceError, match="nightshift up"):
        client.get("x")
