"""A service that is told to end while jobs run: they leave a checkpoint, and the next service goes on with them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from nightshift.config.load import load_job
from tests.contract.test_service_process import write_job
from tests.fakes.up import Up

SECONDS = 120.0


def starts_of(up: Up, job_id: str) -> list[list[str]]:
    """(pid, first step, fence, trace) of each start of a job's process."""
    path = up.folder / "runs" / job_id / "starts.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def runs(pid: str) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rolling_upgrade_loses_no_job(tmp_path: Path) -> None:
    """Start, submit, SIGTERM, start again: what ran goes on behind its checkpoint, what waited gets its turn."""
    with Up(tmp_path / "data", "--at-once", "2", "--drain-seconds", "90") as up, up.client() as client:
        job = load_job(write_job(tmp_path / "mine", steps=12, step_s=0.05), check_files=False)
        (up.folder / "hold").write_text("2")
        ids = [client.submit(job, idempotency_key=str(at)).id for at in range(3)]
        deadline = time.monotonic() + SECONDS
        while sum(found.step > 1 for found in client.jobs()) < 2:
            assert time.monotonic() < deadline, "two jobs run"
            time.sleep(0.05)
        assert up.process is not None
        up.process.send_signal(signal.SIGTERM)
        up.process.wait(SECONDS)
        (up.folder / "hold").unlink()
        first = {job_id: starts_of(up, job_id) for job_id in ids}
        assert sorted(len(starts) for starts in first.values()) == [0, 1, 1], "nothing is started any more"
        assert not any(runs(starts[0][0]) for starts in first.values() if starts), "no job outlives a drained service"
        up.start()
        with up.client() as again:
            assert {found.id for found in again.jobs()} == set(ids)
            for job_id in ids:
                done = again.wait(job_id, SECONDS)
                assert (done.state, done.step) == ("succeeded", 12)
                ledger = again.ledger(job_id)
                assert (ledger["issued"], ledger["trained"], ledger["balanced"]) == (12, 12, True)
                steps = [event.data["step"] for event in again.events(job_id) if event.kind == "step"]
                assert steps == list(range(1, 13)), "each step is made once"
        for job_id, starts in first.items():
            now = starts_of(up, job_id)
            assert len(now) == (2 if starts else 1)
            if starts:
                assert int(now[1][1]) > 1, "it goes on at its checkpoint"
                assert int(now[1][2]) > int(now[0][2]), "under a new fence"


def test_while_it_drains_it_answers_and_says_that_it_is_about_to_end(tmp_path: Path) -> None:
    with Up(tmp_path / "data", "--drain-seconds", "90") as up, up.client() as client:
        job = load_job(write_job(tmp_path / "mine", steps=2), check_files=False)
        (up.folder / "hold").write_text("1 firmly")
        job_id = client.submit(job).id
        up.wait(client, job_id, "running")
        assert httpx.get(f"{up.url}/readyz", trust_env=False).status_code == 200
        assert up.process is not None
        up.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while (answer := httpx.get(f"{up.url}/readyz", trust_env=False)).status_code == 200:
            assert time.monotonic() < deadline
        assert answer.status_code == 503
        assert "about to end" in answer.text
        late = client.submit(job, idempotency_key="late").id
        (up.folder / "hold").unlink()
        up.process.wait(SECONDS)
        up.start()
        with up.client() as again:
            assert again.wait(job_id, SECONDS).state == "succeeded"
            assert again.wait(late, SECONDS).state == "succeeded", "what came while it drained was kept"


@pytest.mark.parametrize("arguments", [["--drain-seconds", "90"], []])
def test_a_second_signal_ends_it_at_once_and_without_draining_jobs_go_on(tmp_path: Path, arguments: list[str]) -> None:
    with Up(tmp_path / "data", *arguments) as up, up.client() as client:
        job = load_job(write_job(tmp_path / "mine", steps=4), check_files=False)
        (up.folder / "hold").write_text("1 firmly")
        job_id = client.submit(job).id
        up.wait(client, job_id, "running")
        (start,) = starts_of(up, job_id)
        assert up.process is not None
        up.process.send_signal(signal.SIGTERM)
        if arguments:
            deadline = time.monotonic() + SECONDS
            while httpx.get(f"{up.url}/readyz", trust_env=False).status_code == 200:
                assert time.monotonic() < deadline
            up.process.send_signal(signal.SIGTERM)
        up.process.wait(SECONDS)
        if not arguments:
            assert runs(start[0])
        (up.folder / "hold").unlink()
        up.start()
        with up.client() as again:
            assert again.wait(job_id, SECONDS).state == "succeeded"
