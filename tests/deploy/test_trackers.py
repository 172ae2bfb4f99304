"""The real W&B (offline) and MLflow behind the trackers: what was logged is read back from what they stored."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.tracking import TrackingConfig
from nightshift.wire.errors import BadInputError
from orchestrator.runner.tracking import open_tracking

pytestmark = pytest.mark.deploy
STEPS = {1: {"reward/mean": 0.25, "kl": float("nan")}, 2: {"reward/mean": 0.5, "kl": 0.1}}


def log_all(folder: Path, config: TrackingConfig, *, until: int = 2) -> None:
    tracking = open_tracking(folder, "run-1", config)
    tracking.log(0, {"eval/score": 0.1}, "evaluation")
    for step in range(1, until + 1):
        tracking.log(step, STEPS[step])
        if step == 2:  # an evaluation has the step of the update before it
            tracking.log(step, {"eval/score": 0.9}, "evaluation")
    tracking.close()


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format behind W&B's 7-byte header: blocks of 32 KiB, records in parts."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_keeps_every_step_and_the_evaluation_of_the_same_step(tmp_path: Path) -> None:
    log_all(tmp_path, TrackingConfig(tensorboard=False, wandb="project"))
    rows = wandb_history(tmp_path)
    assert [(r["step"], r["reward/mean"]) for r in rows if "reward/mean" in r] == [(1, 0.25), (2, 0.5)]
    assert [(r["step"], r["eval/score"]) for r in rows if "eval/score" in r] == [(0, 0.1), (2, 0.9)]
    assert not any(isinstance(value, float) and math.isnan(value) for row in rows for value in row.values())


def test_mlflow_keeps_every_step_once_also_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its other stores need the whole of MLflow
    uri = (tmp_path / "mlruns").as_uri()
    config = TrackingConfig(tensorboard=False, mlflow=uri)
    log_all(tmp_path, config, until=1)
    log_all(tmp_path, config)  # the resumed run makes step 1 again
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("nightshift").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "eval/score")] == [(0, 0.1), (2, 0.9)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "kl")] == [2]
    assert run.info.status == "FINISHED"
    assert run.data.tags["nightshift.run_id"] == "run-1"


def test_an_mlflow_that_does_not_answer_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"MLflow at http://127\.0\.0\.1:9 does not answer"):
        open_tracking(tmp_path, "run-1", TrackingConfig(tensorboard=False, mlflow="http://127.0.0.1:9"))
