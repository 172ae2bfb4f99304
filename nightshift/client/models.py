"""What the service answers with, as plain values with types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

#: States in which nothing of a job runs or waits.
ENDED = frozenset({"succeeded", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class _Answer:
    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """An answer of the service; fields that a newer service adds are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, slots=True)
class Job(_Answer):
    """A job. Times are unix seconds; ``spec`` is there where one job was asked for."""

    id: str
    project: str
    name: str
    state: str
    pausing: bool
    priority: int
    submitter: str
    submitted: float
    started: float | None
    ended: float | None
    updated: float
    step: int
    steps: int
    error: str
    exit_code: int | None
    spec: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it succeeded, failed or was cancelled."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Checkpoint(_Answer):
    """A checkpoint in HF format."""

    step: int
    policy_version: str | None
    time: float
    bytes: int
    files: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job. ``id``: where a stream goes on behind it."""

    id: str
    kind: str
    data: dict[str, Any]
