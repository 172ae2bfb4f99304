"""What a job has done: metrics, rollouts, ledger, checkpoints, logs, report, traces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Path as InPath
from fastapi import Query
from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse

from nightshift.analysis.recording import load
from nightshift.analysis.report import report as make_report
from nightshift.cli.runs import EVENTS
from nightshift.cli.trace import find_trace, timeline
from nightshift.wire.events import plain, read_events
from orchestrator.api import readers
from orchestrator.api.models import (
    Checkpoint,
    CheckpointFile,
    CheckpointList,
    Ledger,
    LogFile,
    LogList,
    MetricsHistory,
    MetricsPoint,
    Rollout,
    RolloutPage,
    Trace,
    TraceEntry,
)
from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.routes_jobs import JobId
from orchestrator.api.service import Caller, Reader, Service, ServiceDep, visible
from orchestrator.api.strict import strict_router

router = strict_router(prefix="/v1", tags=["results"])
Step = Annotated[int, InPath(ge=0, le=2**31)]
_TRACE_ID = r"^[0-9a-f]{8,32}$"
#: Most of the newest jobs that are searched for a trace.
_TRACED_JOBS = 200
_ROLLOUT_SORTS = Literal[
    "step", "-step", "reward", "-reward", "response_tokens", "-response_tokens", "prompt_tokens", "-prompt_tokens"
]


def _run_dir(service: Service, caller: Caller, job_id: str) -> Path:
    return Path(visible(service, caller, job_id).run_dir)


def logs_of(service: Service, caller: Caller, job_id: str) -> dict[str, Path]:
    """Role -> its log."""
    return readers.log_files(_run_dir(service, caller, job_id))


@router.get("/jobs/{job_id}/metrics-history", response_model=MetricsHistory, responses=errors(404))
def metrics_history(
    service: ServiceDep,
    caller: Reader,
    job_id: JobId,
    kind: Annotated[Literal["train", "evaluation"] | None, Query()] = None,
    name: Annotated[list[str] | None, Query(description="Only these metrics; repeat it for several.")] = None,
    after: Annotated[int | None, Query(ge=-1, le=2**31, description="Only later steps.")] = None,
    before: Annotated[int | None, Query(ge=0, le=2**31, description="Only steps up to this one.")] = None,
    most: Annotated[int, Query(ge=1, le=100_000, description="Most points; evenly chosen of more.")] = 5000,
) -> MetricsHistory:
    """Metrics by step."""
    points = readers.metrics(
        _run_dir(service, caller, job_id) / "metrics.jsonl",
        kind=kind,
        names=frozenset(name or ()),
        after=after,
        before=before,
        most=most,
    )
    names = sorted({key for point in points for key in point["metrics"]})
    return MetricsHistory(names=names, points=[MetricsPoint(**point) for point in points])


@router.get("/jobs/{job_id}/rollouts", response_model=RolloutPage, responses=errors(404))
def rollouts(
    service: ServiceDep,
    caller: Reader,
    job_id: JobId,
    step: Annotated[int | None, Query(ge=0, le=2**31)] = None,
    group_id: Annotated[str | None, Query(max_length=200)] = None,
    trace_id: Annotated[str | None, Query(max_length=32)] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    finish_reason: Annotated[str | None, Query(max_length=50)] = None,
    sort: Annotated[_ROLLOUT_SORTS, Query(description="With `-` in front: the greatest first.")] = "-step",
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> RolloutPage:
    """What was generated and trained on."""
    query = readers.RolloutQuery(
        step=step,
        group_id=group_id,
        trace_id=trace_id,
        min_reward=min_reward,
        max_reward=max_reward,
        finish_reason=finish_reason,
        sort=sort,
        offset=offset,
        limit=limit,
    )
    return find_rollouts(service, caller, job_id, query)


def find_rollouts(service: Service, caller: Caller, job_id: str, query: readers.RolloutQuery) -> RolloutPage:
    """One page of stored samples."""
    total, rows = readers.rollouts(_run_dir(service, caller, job_id) / "rollouts", query)
    return RolloutPage(total=total, rollouts=[_rollout(row) for row in rows])


def _rollout(row: dict[str, Any]) -> Rollout:
    row = plain(row)
    row["prompt"], row["response"] = row.pop("prompt_text", None), row.pop("response_text", None)
    row["versions"], row["version_starts"] = row.get("versions") or [], row.get("version_starts") or []
    return Rollout(**row)


@router.get("/jobs/{job_id}/ledger", response_model=Ledger, responses=errors(404))
def ledger(service: ServiceDep, caller: Reader, job_id: JobId) -> Ledger:
    """What became of every prompt group: issued = trained + dropped + failed + cancelled + in_flight."""
    record = visible(service, caller, job_id)
    names = [name for name in Ledger.model_fields if name != "balanced"]
    terms = dict.fromkeys(names, 0)
    url = service.scheduler.ledger_url(record)
    if service.config.database_url or (Path(record.run_dir) / "state.db").exists():
        balance = service.ledgers.store(url).balance(record.id)
        terms |= {name: count for name, count in balance.items() if name in terms}
    ends = sum(count for name, count in terms.items() if name != "issued")
    return Ledger(**terms, balanced=terms["issued"] == ends)


@router.get("/jobs/{job_id}/checkpoints", response_model=CheckpointList, responses=errors(404))
def checkpoints(service: ServiceDep, caller: Reader, job_id: JobId) -> CheckpointList:
    """Checkpoints in HF format."""
    views = readers.checkpoint_views(_run_dir(service, caller, job_id))
    return CheckpointList(checkpoints=[_checkpoint(view) for view in views])


def _checkpoint(view: readers.CheckpointView) -> Checkpoint:
    return Checkpoint(
        step=view.step,
        policy_version=view.policy_version,
        time=view.time,
        bytes=sum(view.files.values()),
        files=[CheckpointFile(name=name, bytes=size) for name, size in view.files.items()],
    )


def one_checkpoint(service: Service, caller: Caller, job_id: str, step: int) -> readers.CheckpointView:
    """The checkpoint of a step.

    Raises:
        ProblemError: there is none.
    """
    views = readers.checkpoint_views(_run_dir(service, caller, job_id))
    found = next((view for view in views if view.step == step), None)
    if found is None:
        steps = ", ".join(str(view.step) for view in views) or "none"
        raise ProblemError(404, f"job {job_id} has no checkpoint of step {step}; it has: {steps}")
    return found


@router.get(
    "/jobs/{job_id}/checkpoints/{step}/archive",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}},
        **errors(404),
    },
)
def checkpoint_archive(service: ServiceDep, caller: Reader, job_id: JobId, step: Step) -> StreamingResponse:
    """A checkpoint as one tar stream."""
    view = one_checkpoint(service, caller, job_id, step)
    archive = readers.Archive(view.folder, view.folder.name)
    headers = {
        "Content-Length": str(archive.size),
        "Content-Disposition": f'attachment; filename="{job_id}-step-{step}.tar"',
    }
    return StreamingResponse(archive.chunks(), media_type="application/x-tar", headers=headers)


@router.get(
    "/jobs/{job_id}/checkpoints/{step}/files/{name}",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "A range of it"},
        416: {"description": "No such range"},
        **errors(404),
    },
)
def checkpoint_file(
    service: ServiceDep, caller: Reader, job_id: JobId, step: Step, name: Annotated[str, InPath(max_length=255)]
) -> FileResponse:
    """One file of a checkpoint; ranges are served."""
    view = one_checkpoint(service, caller, job_id, step)
    if name not in view.files:
        raise ProblemError(404, f"the checkpoint of step {step} has no file {name!r}")
    return FileResponse(view.folder / name, media_type="application/octet-stream", filename=name)


@router.get("/jobs/{job_id}/logs", response_model=LogList, responses=errors(404))
def logs(service: ServiceDep, caller: Reader, job_id: JobId) -> LogList:
    """Which logs there are."""
    found = logs_of(service, caller, job_id)
    return LogList(logs=[LogFile(role=role, bytes=path.stat().st_size) for role, path in found.items()])


@router.get(
    "/jobs/{job_id}/logs/{role:path}",
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors(404)},
)
def log(
    service: ServiceDep,
    caller: Reader,
    job_id: JobId,
    role: Annotated[str, InPath(max_length=300)],
    lines: Annotated[int, Query(ge=1, le=100_000)] = 200,
) -> PlainTextResponse:
    """The last lines of a role's log."""
    found = logs_of(service, caller, job_id)
    if role not in found:
        raise ProblemError(404, f"job {job_id} has no log of {role!r}; it has: {', '.join(found) or 'none yet'}")
    return PlainTextResponse(readers.log_tail(found[role], lines))


@router.get("/jobs/{job_id}/report", response_model=dict[str, Any], responses=errors(404))
def report(service: ServiceDep, caller: Reader, job_id: JobId) -> dict[str, Any]:
    """Step time against the model's, idle time of each role, staleness, and what to change."""
    found: dict[str, Any] = plain(asdict(make_report(load(_run_dir(service, caller, job_id)))))
    return found


@router.get("/traces/{trace_id}", response_model=Trace, responses=errors(404))
def trace(
    service: ServiceDep,
    caller: Reader,
    trace_id: Annotated[str, InPath(pattern=_TRACE_ID, description="Or its beginning, where no other has it.")],
    job: Annotated[str | None, Query(max_length=128, description="Where to look; else in the newest jobs.")] = None,
) -> Trace:
    """The timeline of one prompt group, from the prompt to the gradient."""
    if not re.fullmatch(_TRACE_ID, trace_id):
        raise ProblemError(404, f"{trace_id[:40]!r} is no trace id: 32 hexadecimal digits, or at least the first 8")
    for record in _candidates(service, caller, job):
        path = Path(record.run_dir) / EVENTS
        if not readers.mentions(path, trace_id.encode()):
            continue
        found = read_events(path)
        if len(whole := find_trace(found, trace_id)) > 1:
            detail = f"{trace_id!r} fits {len(whole)} traces of job {record.id}: {', '.join(whole[:5])}"
            raise ProblemError(422, detail, errors=[("trace_id", "must fit one trace")])
        # Where no span is its own, some of another trace may link to it.
        entries = timeline(found, known := (whole or [trace_id])[0])
        if entries:
            made = [TraceEntry(**plain(asdict(entry))) for entry in entries]
            return Trace(trace_id=known, job=record.id, entries=made)
    raise ProblemError(404, f"no job that this token may see knows the trace {trace_id}")


def _candidates(service: Service, caller: Caller, job: str | None) -> Iterator[Any]:
    if job is not None:
        yield visible(service, caller, job)
    else:
        yield from service.jobs.find(project=caller.project, limit=_TRACED_JOBS)
