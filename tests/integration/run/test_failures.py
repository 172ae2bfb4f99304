"""Runs that are interrupted, or that cannot start: a clear word each time, and nothing left behind.

Roles that are killed: test_kills.py.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import Finished, Running, leftovers, run, write_job

pytestmark = pytest.mark.integration

LONG = {"total_steps": 400, "learning_rate": 1e-4, "micro_batch_size": 4, "test_freq": 0}
ASYNC = {"max_staleness": 1, "deterministic": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def balanced(finished: Finished) -> None:
    ledger = finished.of_kind("summary")[-1]["ledger"]
    assert ledger["issued"] == sum(value for name, value in ledger.items() if name != "issued")


def test_ctrl_c_leaves_a_checkpoint_and_the_run_goes_on_from_it(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model, trainer=LONG, pipeline=ASYNC)
    running = Running(job)
    running.wait_for("step", step=3)
    running.interrupt()
    stopped = running.finish()
    assert stopped.code == 130, stopped.output
    assert leftovers(stopped.folder.name) == []
    balanced(stopped)
    step = stopped.of_kind("checkpoint")[-1]["step"]
    assert step >= 3
    assert f"--resume {stopped.folder.name}" in stopped.output

    again = run(job, f"trainer.total_steps={step + 2}", "--resume", str(stopped.folder))
    assert again.code == 0, again.output
    assert leftovers(again.folder.name) == []
    balanced(again)
    assert [event["step"] for event in again.of_kind("step")] == list(range(1, step + 3))
    assert {event["step"] for event in again.of_kind("checkpoint")} >= {step, step + 2}


def test_a_taken_port_is_named_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run(write_job(tmp_path, model, resources={"ports": {"rollout": port}}))
    assert ended.code == 2
    assert str(port) in ended.output
    assert "rollout" in ended.output
    assert not ended.folder.exists()


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model": {"path": "/nowhere/model"}}, "/nowhere/model"),
        ({"rewards": [{"function": "absent.py:score"}]}, "absent.py"),
        ({"rewards": [{"function": "reward.py:scorre"}]}, "scorre"),
        ({"data": {"max_prompt_length": 3}}, "max_prompt_length"),
        ({"data": {"train_files": ["empty.jsonl"]}}, "empty.jsonl"),
        ({"trainer": {"learning_rat": 1e-3}}, "learning_rate"),
        ({"rollout": {"n": 1}}, "estimator"),
    ],
)
def test_bad_input_is_refused_by_name(model: Path, tmp_path: Path, overrides: dict, named: str) -> None:
    job = write_job(tmp_path, model, **overrides)
    (tmp_path / "empty.jsonl").write_text("")
    ended = run(job)
    assert ended.code == 2, ended.output
    assert named in ended.output
    assert "Traceback" not in ended.output
    assert not ended.folder.exists()


def test_a_reward_that_cannot_be_imported_ends_the_start_by_name(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model)
    (tmp_path / "reward.py").write_text("import no_such_module\ndef score(response, ground_truth):\n    return 1.0\n")
    ended = run(job)
    assert ended.code == 2, ended.output
    assert "[reward]" in ended.output
    assert "no_such_module" in ended.output
    assert leftovers(ended.folder.name) == []


def test_o35_a_reward_that_raises_fails_the_job_with_its_cause(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model)
    (tmp_path / "reward.py").write_text("def score(response, ground_truth):\n    return {}['missing key']\n")
    ended = run(job)
    assert ended.code == 1, ended.output
    assert "[reward]" in ended.output
    assert "missing key" in ended.output
    assert leftovers(ended.folder.name) == []
