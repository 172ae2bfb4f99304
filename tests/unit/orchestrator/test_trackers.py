"""Trackers behind one interface: TensorBoard for real, and what a missing package says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.tracking import TrackingConfig
from nightshift.wire.errors import BadInputError
from orchestrator.runner.tracking import open_tracking


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_o45_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    first = open_tracking(tmp_path, "r", TrackingConfig())
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 10, "kl": float("nan")})
    first.close()
    second = open_tracking(tmp_path, "r", TrackingConfig())
    second.drop_after(2)
    for step in (3, 4):
        second.log(step, {"reward/mean": step / 100})
    second.close()
    assert curves(tmp_path) == {"reward/mean": [(1, 0.1), (2, 0.2), (3, 0.03), (4, 0.04)]}


@pytest.mark.parametrize(("key", "value"), [("wandb", "project"), ("mlflow", "http://127.0.0.1:1")])
def test_a_tracker_without_its_package_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(BadInputError, match=f"package '{key}' is not installed"):
        open_tracking(tmp_path, "r", TrackingConfig(tensorboard=False, **{key: value}))
