"""What the service answers with. Times are unix seconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.jobs.states import JobState
from orchestrator.store.access import Scope
from orchestrator.store.jobs import JobRecord


class Body(BaseModel):
    """A request's body: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class Job(BaseModel):
    """A job."""

    id: str
    project: str
    name: str
    state: JobState
    pausing: bool = Field(description="Asked to pause; it is paused once its checkpoint is written.")
    priority: int
    submitter: str = Field(description="Name of the token that submitted it.")
    submitted: float
    started: float | None = Field(description="Last start of its process.")
    ended: float | None
    updated: float
    step: int = Field(description="Optimiser steps finished.")
    steps: int = Field(description="Steps of the run; 0 while unknown.")
    error: str = Field(description="Why it failed, in one sentence.")
    exit_code: int | None

    @classmethod
    def of(cls, record: JobRecord) -> Job:
        """A record as the service shows it."""
        return cls(
            id=record.id,
            project=record.project,
            name=record.name,
            state=record.state,
            pausing=record.status.wish == "pause",
            priority=record.priority,
            submitter=record.submitter,
            submitted=record.submitted,
            started=record.started,
            ended=record.ended,
            updated=record.updated,
            step=record.step,
            steps=record.steps,
            error=record.error,
            exit_code=record.exit_code,
        )


class JobDetail(Job):
    """A job with its job file."""

    spec: dict[str, Any] = Field(description="The job file with its defaults.")


class JobPage(BaseModel):
    """Jobs, the newest first."""

    jobs: list[Job]
    next: str | None = Field(description="Value of `cursor` for the next page; null on the last one.")


class MetricsPoint(BaseModel):
    """Metrics of one step or evaluation."""

    step: int
    kind: Literal["train", "evaluation"]
    time: float
    metrics: dict[str, float | None]


class MetricsHistory(BaseModel):
    """A run's metrics, by step."""

    names: list[str] = Field(description="All names that occur in the points.")
    points: list[MetricsPoint]


class Rollout(BaseModel):
    """One sample that was trained on."""

    step: int
    group_id: str
    sample_id: str
    row_id: str | None = None
    epoch: int | None = None
    trace_id: str | None = None
    prompt: str | None = None
    response: str | None = None
    reward: float | None = None
    reward_error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    versions: list[str] = Field(default_factory=list, description="Policy versions of its tokens, in order.")
    version_starts: list[int] = Field(default_factory=list, description="First token of each version.")
    generate_seconds: float | None = None
    reward_seconds: float | None = None
    reference_seconds: float | None = None
    critic_seconds: float | None = None
    peak_memory_bytes: int | None = Field(None, description="Highest resident memory of a scorer that scored it.")


class RolloutPage(BaseModel):
    """Samples, filtered and sorted."""

    total: int = Field(description="Samples that the filters leave.")
    rollouts: list[Rollout]


class Ledger(BaseModel):
    """What became of every prompt group."""

    issued: int
    trained: int
    dropped_stale: int
    dropped_filtered: int
    failed: int
    cancelled: int
    in_flight: int
    balanced: bool = Field(description="Whether every issued group is accounted for.")


class CheckpointFile(BaseModel):
    """A file of a checkpoint."""

    name: str
    bytes: int


class Checkpoint(BaseModel):
    """A checkpoint in HF format."""

    step: int
    policy_version: str | None
    time: float
    bytes: int
    files: list[CheckpointFile]


class CheckpointList(BaseModel):
    """Checkpoints, the oldest first."""

    checkpoints: list[Checkpoint]


class LogFile(BaseModel):
    """The log of a role."""

    role: str
    bytes: int


class LogList(BaseModel):
    """Which logs there are."""

    logs: list[LogFile]


class TraceEntry(BaseModel):
    """One line of a timeline; times in seconds from its first span."""

    kind: Literal["span", "linked", "gap"]
    name: str
    depth: int
    offset: float
    seconds: float
    role: str
    status: str
    span_id: str
    trace_id: str
    attributes: dict[str, Any]


class Trace(BaseModel):
    """The timeline of one prompt group or of a job."""

    trace_id: str
    job: str
    entries: list[TraceEntry]


class Setting(BaseModel):
    """A live setting of a job."""

    key: str
    value: Any
    live: bool = Field(description="Whether it can change while the job runs.")
    why: str = Field(description="When a change takes effect, or why it cannot change.")


class SettingsList(BaseModel):
    """Live settings of a job, and changes that wait for a step boundary."""

    settings: list[Setting]
    pending: dict[str, Any] = Field(description="Asked for, and not yet in effect.")


class Asked(BaseModel):
    """A request to a driven job."""

    number: int = Field(description="Under which its answer is found.")


class Upload(BaseModel):
    """A file that submissions may refer to as `upload:<sha256>/<file name>`."""

    sha256: str
    bytes: int


class UploadInfo(Upload):
    """A file that is there."""

    time: float = Field(description="When it came.")


class UploadList(BaseModel):
    """Files of a project."""

    bytes: int = Field(description="Of all of them together.")
    most_bytes: int = Field(description="That a project may have.")
    uploads: list[UploadInfo]


class NewToken(Body):
    """A token to be made."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    scopes: list[Scope] = Field(min_length=1, max_length=4)
    project: str | None = Field(default=None, description="Null: all projects.", max_length=64)
    ttl_s: float | None = Field(default=None, gt=0, le=315360000, description="Null: does not expire.")


class TokenInfo(BaseModel):
    """A token without its secret."""

    id: str
    name: str
    project: str | None
    scopes: list[Scope]
    created: float
    expires: float | None
    revoked: bool


class MadeToken(TokenInfo):
    """A token that was just made."""

    token: str = Field(description="Its text: shown once, and kept nowhere.")


class TokenList(BaseModel):
    """All tokens."""

    tokens: list[TokenInfo]


class Quotas(Body):
    """Limits of a project; null: none."""

    max_running: int | None = Field(default=None, ge=0, le=1_000_000)
    max_waiting: int | None = Field(default=None, ge=0, le=1_000_000)


class ProjectInfo(BaseModel):
    """A project."""

    name: str
    max_running: int | None
    max_waiting: int | None
    created: float


class ProjectList(BaseModel):
    """Projects, by name."""

    projects: list[ProjectInfo]


class AuditEntry(BaseModel):
    """Who did what."""

    number: int
    time: float
    actor: str
    project: str
    action: str
    target: str
    detail: dict[str, Any]


class AuditLog(BaseModel):
    """Entries, the newest first."""

    entries: list[AuditEntry]


class Health(BaseModel):
    """Whether the service works."""

    status: Literal["ok"] = "ok"
    version: str
