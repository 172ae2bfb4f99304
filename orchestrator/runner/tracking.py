"""Where metrics go: ``metrics.jsonl`` always, TensorBoard where it is wanted and installed."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any


class Tracking:
    """Writes metrics of steps and evaluations. NaN is written as null and never hides other values."""

    def __init__(self, run_dir: Path, *, tensorboard: bool) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._writer: Any = None
        if tensorboard:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float], kind: str = "train") -> None:
        """Writes the metrics of one step; ``kind`` is "train" or "evaluation"."""
        clean = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "kind": kind, "time": time.time(), "metrics": clean})
        with self._path.open("a") as file:
            file.write(line + "\n")
        if self._writer is not None:
            self._tensorboard(step, clean)

    def drop_after(self, step: int) -> None:
        """Removes the lines of steps after ``step``: a run that goes back writes them again."""
        if not self._path.exists():
            return
        kept = [line for line in self._lines() if line["step"] <= step]
        part = self._path.with_suffix(".tmp")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(self._path)
        if self._writer is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # TensorBoard leaves out what earlier files hold from this step on.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

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
        if self._writer is not None:
            self._writer.close()

    def _tensorboard(self, step: int, metrics: dict[str, float | None]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()
