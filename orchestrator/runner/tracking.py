"""Where metrics go: ``metrics.jsonl`` always, and every tracker that the job names."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nightshift.config.tracking import TrackingConfig
from orchestrator.runner.trackers import MlflowTracker, TensorBoardTracker, Tracker, WandbTracker


class Tracking:
    """Writes metrics of steps and evaluations. NaN is written as null and never hides other values."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._trackers = trackers

    def log(self, step: int, metrics: dict[str, float], kind: str = "train") -> None:
        """Writes the metrics of one step; ``kind`` is "train" or "evaluation"."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "kind": kind, "time": time.time(), "metrics": clean})
        with self._path.open("a") as file:
            file.write(line + "\n")
        known = {name: value for name, value in clean.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, known)

    def drop_after(self, step: int) -> None:
        """Removes the lines of steps after ``step``: a run that goes back writes them again."""
        if not self._path.exists():
            return
        kept = [line for line in self._lines() if line["step"] <= step]
        part = self._path.with_suffix(".tmp")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(self._path)
        for tracker in self._trackers:
            tracker.drop_after(step)

    def logged(self, kind: str) -> set[int]:
        """Steps whose metrics of this kind were written."""
        return {line["step"] for line in self._lines() if line["kind"] == kind} if self._path.exists() else set()

    def _lines(self) -> list[dict[str, Any]]:
        """All whole lines; a killed process may have left half of one."""
        lines = []
        for text in self._path.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def close(self) -> None:
        """Writes out what is buffered."""
        for tracker in self._trackers:
            tracker.close()


def open_tracking(run_dir: Path, run_id: str, config: TrackingConfig) -> Tracking:
    """The tracking that a job asks for.

    Raises:
        BadInputError: a tracker's package is not installed.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoardTracker(run_dir))
    if config.wandb is not None:
        trackers.append(WandbTracker(run_dir, run_id, config.wandb))
    if config.mlflow is not None:
        trackers.append(MlflowTracker(run_id, config.mlflow))
    return Tracking(run_dir, trackers)
