"""What a run left in its folder, as far as its speed can be read from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.analysis.spans import Interval
from nightshift.wire.errors import BadInputError
from nightshift.wire.events import follow_events

_ROLLOUT_COLUMNS = ("step", "group_id", "trained_version", "versions", "version_starts", "response_tokens")
#: Spans of a run's services that say nothing about its steps, one or more per sample.
_IGNORED = frozenset({"llm_request"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step's line of ``metrics.jsonl``. ``time`` is its end in unix seconds."""

    step: int
    time: float
    metrics: Mapping[str, float | None]

    @property
    def window(self) -> Interval | None:
        """From the end of the step before to its own end; None where its time is not known."""
        seconds = self.metrics.get("timing/step")
        return (self.time - seconds, self.time) if seconds is not None else None


@dataclass(frozen=True, slots=True)
class Span:
    """One span: when, in which trace, and the step that it belongs to, or its group went into."""

    name: str
    trace_id: str
    start: float
    end: float
    step: int | None = None

    @property
    def interval(self) -> Interval:
        """(start, end) in unix seconds."""
        return (self.start, self.end)


@dataclass(slots=True)
class Recording:
    """A run's record.

    Attributes:
        job: the resolved job; empty where the folder has none.
        starts: unix seconds at which the job began to make steps: once, and once per resume.
        total_steps: None where no step event said it.
        rollouts: rows of stored samples, the columns that staleness needs; None: none were stored.
    """

    run_id: str
    job: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    total_steps: int | None = None
    rollouts: list[dict[str, Any]] | None = None

    def setting(self, section: str, key: str) -> Any:
        """A value of the job.

        Raises:
            KeyError: the job does not say it.
        """
        return self.job[section][key]

    def named(self, name: str) -> list[Span]:
        """The spans of a name."""
        return self.spans.get(name, [])


def load(folder: Path) -> Recording:
    """Reads a run's folder; whatever is not there is left empty.

    Raises:
        BadInputError: the job or a file of rollouts cannot be read; the message names it.
    """
    recording = Recording(folder.name, job=_job(folder / "job.yaml"), steps=_steps(folder / "metrics.jsonl"))
    for event in follow_events(folder / "events.jsonl", stop=lambda: True):
        match event.get("kind"):
            case "span":
                if (span := _span(event)) is not None:
                    recording.spans.setdefault(span.name, []).append(span)
            case "job" if event.get("state") == "running":
                recording.starts.append(float(event.get("time") or 0.0))
            case "step" if event.get("steps"):
                recording.total_steps = int(event["steps"])
    recording.rollouts = _rollouts(folder / "rollouts")
    return recording


def _job(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInputError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from error
    return job if isinstance(job, dict) else {}


def _steps(path: Path) -> list[Step]:
    """Lines of training steps in order, the last of each step; half a line of a killed process is left out."""
    if not path.exists():
        return []
    steps: dict[int, Step] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["kind"] == "train":
                steps[int(line["step"])] = Step(int(line["step"]), float(line["time"]), dict(line["metrics"]))
        except (ValueError, KeyError, TypeError):
            continue
    return [steps[number] for number in sorted(steps)]


def _span(event: Mapping[str, Any]) -> Span | None:
    name, start, end = str(event.get("name") or ""), event.get("start"), event.get("end")
    if name in _IGNORED or start is None or end is None:
        return None
    attributes = event.get("attributes") or {}
    step = attributes.get("rl.step", attributes.get("step"))
    return Span(name, str(event.get("trace_id") or ""), float(start), float(end), None if step is None else int(step))


def _rollouts(folder: Path) -> list[dict[str, Any]] | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    paths = sorted(folder.glob("*.parquet"))
    for path in paths:
        try:
            file = pq.ParquetFile(path)
            columns = [name for name in _ROLLOUT_COLUMNS if name in file.schema_arrow.names]
            rows += file.read(columns=columns).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from error
    return rows if paths else None
