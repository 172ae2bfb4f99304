"""``nightshift replay``: a step of an asynchronous run, made again from its checkpoint and its stored experience."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nightshift.wire.schedule import SCHEDULE, read_schedule
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import ROOT, Finished, run, write_job

pytestmark = pytest.mark.integration

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """An asynchronous run whose updates come in parts of one group."""
    folder = tmp_path_factory.mktemp("replayed")
    job = write_job(
        folder,
        build_tiny_model(folder / "model"),
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 240},
        rollout={"batch_size": 4},
        trainer={"total_steps": STEPS, "save_freq": 2, "lr_schedule": "cosine", "warmup_steps": 1},
    )
    done = run(job)
    assert done.code == 0, done.output
    return done


@pytest.fixture(scope="module")
def with_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Policy and critic on two ranks each, and a first step that trains the critic alone."""
    folder = tmp_path_factory.mktemp("two")
    job = write_job(
        folder,
        build_tiny_model(folder / "model"),
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 240},
        algorithm={"estimator": "gae", "kl_coef": 0.0, "bootstrap_truncated": True},
        scorers={"critic": {"learning_rate": 1e-2, "warmup_steps": 1, "ranks": 2}},
        trainer={"total_steps": STEPS, "save_freq": 2, "micro_batch_size": 2, "ranks": 2},
    )
    done = run(job)
    assert done.code == 0, done.output
    return done


def replay(run_dir: Path, step: int, *more: str) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "nightshift.cli.main", "replay", str(run_dir), "--step", str(step), *more]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = json.loads(done.stdout) if "--json" in more and done.returncode < 2 else None
    return done.returncode, found, done.stdout + done.stderr


def tampered(finished: Finished, folder: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of the run in which the stored rollouts of a step were changed."""
    copy = folder / finished.folder.name
    shutil.copytree(finished.folder, copy, ignore=shutil.ignore_patterns("logs", "actor"))
    path = copy / "rollouts" / f"step_{step:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return copy


def test_the_schedule_says_what_each_step_was_made_of(finished: Finished) -> None:
    schedule = read_schedule(finished.folder)
    assert list(schedule) == [1, 2, 3, 4]
    assert max(len(record.parts) for record in schedule.values()) > 1
    groups = [group for record in schedule.values() for part in record.parts for group in part]
    assert len(groups) == len(set(groups)) == 4 * STEPS
    assert len({record.digest for record in schedule.values()}) == STEPS
    assert len({record.learning_rate for record in schedule.values()}) == STEPS
    state = finished.folder / "checkpoints" / "trainer" / "global_step_2" / "manifest.json"
    assert [line["step"] for line in json.loads(state.read_text())["schedule"]] == [1, 2]


def test_a_middle_step_is_made_again_to_the_bit(finished: Finished) -> None:
    code, found, output = replay(finished.folder, 3, "--json")
    assert code == 0, output
    assert found["begun_at"] == 2
    assert found["equal"] is True
    (step,) = found["steps"]
    assert step["replayed"] == step["recorded"] == read_schedule(finished.folder)[3].digest
    assert step["advantage_difference"] == 0
    assert found["weight_difference"] is None


def test_from_the_model_s_own_weights_to_a_checkpoint_the_difference_is_0(finished: Finished, tmp_path: Path) -> None:
    copy = tampered(finished, tmp_path, 1, lambda rows: None)
    shutil.rmtree(copy / "checkpoints" / "trainer" / "global_step_2")
    code, found, output = replay(copy, STEPS, "--json")
    assert code == 0, output
    assert found["begun_at"] == 0
    assert [step["same"] for step in found["steps"]] == [True] * STEPS
    assert found["weight_difference"] == 0.0


def test_tampered_advantages_are_found(finished: Finished, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["advantages"] = [value + 1.0 for value in rows[0]["advantages"]]

    code, found, output = replay(tampered(finished, tmp_path, STEPS, change), STEPS, "--json")
    assert code == 1, output
    (step,) = [step for step in found["steps"] if step["step"] == STEPS]
    assert step["same"] is False
    assert step["advantage_difference"] == pytest.approx(1.0)
    assert found["weight_difference"] > 0


def test_a_tampered_reward_is_found(finished: Finished, tmp_path: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["reward"] += 0.5

    code, _, output = replay(tampered(finished, tmp_path, 3, change), 3)
    assert code == 1, output
    assert "step 3: the same weights" in output
    assert "the stored advantages DIFFER from those of the stored rewards" in output


def test_what_cannot_be_replayed_is_one_sentence(finished: Finished, tmp_path: Path) -> None:
    code, _, output = replay(finished.folder, 9)
    assert (code, "the run has no step 9 in its schedule (it has 1 to 4)" in output) == (2, True)
    copy = tampered(finished, tmp_path, 3, lambda rows: None)
    (copy / "rollouts" / "step_000003.parquet").unlink()
    code, _, output = replay(copy, 3)
    assert (code, "Only runs with tracking.rollouts can be replayed" in output) == (2, True)
    (copy / SCHEDULE).unlink()
    code, _, output = replay(copy, 3)
    assert (code, "it has made no step" in output) == (2, True)


def test_two_ranks_and_the_critic_are_made_again_to_the_bit(with_two_ranks: Finished, tmp_path: Path) -> None:
    """From the model's own weights, the critic's head at 0, past a checkpoint to the last step."""
    copy = tampered(with_two_ranks, tmp_path, 1, lambda rows: None)
    for role in ("trainer", "critic"):
        shutil.rmtree(copy / "checkpoints" / role / "global_step_2")
    code, found, output = replay(copy, STEPS, "--json")
    assert code == 0, output
    assert (found["begun_at"], found["ranks"], found["critic_ranks"]) == (0, 2, 2)
    schedule = read_schedule(with_two_ranks.folder)
    assert [schedule[step].stepped for step in sorted(schedule)] == [False, True, True, True]
    for step in found["steps"]:
        record = schedule[step["step"]]
        assert step["replayed"] == step["recorded"] == record.digest
        assert step["critic"]["replayed"] == step["critic"]["recorded"] == record.critic["digest"]
        assert (step["advantage_difference"], step["note"]) == (0, "")
    assert len({step["critic"]["replayed"] for step in found["steps"]}) == STEPS
    assert (found["weight_difference"], found["critic_weight_difference"]) == (0.0, 0.0)


def test_what_the_critic_was_not_trained_on_is_found(with_two_ranks: Finished, tmp_path: Path) -> None:
    """From the checkpoint of step 2, whose resume state each rank of both has a part of."""

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["returns"] = [value + 1.0 for value in rows[0]["returns"]]

    code, found, output = replay(tampered(with_two_ranks, tmp_path, 3, change), 3, "--json")
    assert code == 1, output
    assert found["begun_at"] == 2
    (step,) = found["steps"]
    assert (step["same"], step["critic"]["same"]) == (True, False)
    assert step["advantage_difference"] == pytest.approx(1.0)
