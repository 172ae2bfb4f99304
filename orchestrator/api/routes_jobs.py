"""Submitting, listing and steering jobs."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool

from nightshift.cli.runs import JOB
from nightshift.wire.errors import WireError
from nightshift.wire.mailbox import Mailbox
from nightshift.wire.trace import TraceContext
from orchestrator.api.models import Job, JobDetail, JobPage
from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.service import Caller, Reader, Service, ServiceDep, Submitter, visible
from orchestrator.api.strict import strict_router
from orchestrator.jobs.document import DocumentError, read_document
from orchestrator.jobs.scheduler import say
from orchestrator.jobs.states import Call, JobState, ask
from orchestrator.jobs.submission import body_hash, check_code, check_fleet, prepare, validate
from orchestrator.store.access import Scope
from orchestrator.store.jobs import JobRecord, NewJob

router = strict_router(prefix="/v1", tags=["jobs"])
JobId = Annotated[str, InPath(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_PLAN_S = 120.0
_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")

#: The body of a submission: the job file, in either form.
JOB_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A job file. Files that it names are uploads (`upload:<sha256>/<file name>`), URLs, HF ids, or "
        "paths that the service allows.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}},
            "application/yaml": {"schema": {"type": "string"}},
        },
    }
}


async def _parse(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", *_YAML):
        raise ProblemError(415, f"the body is {kind!r}, but must be application/json or application/yaml")
    body = await request.body()
    # In a thread: a mebibyte of YAML takes a second, for which nobody else would be answered.
    return await run_in_threadpool(read_document, body, is_json=kind == "application/json")


@router.post(
    "/jobs",
    status_code=201,
    response_model=JobDetail,
    responses={200: {"model": JobDetail, "description": "The key made this job before"}, **errors(404, 415)},
    openapi_extra=JOB_BODY,
)
async def submit(
    request: Request,
    response: Response,
    service: ServiceDep,
    caller: Submitter,
    project: Annotated[str | None, Query(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = None,
    priority: Annotated[int, Query(ge=-100, le=100, description="Higher goes first.")] = 0,
    session: Annotated[bool, Query(description="Driven step by step: rollouts and steps are asked for.")] = False,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=255, pattern=r"^[ -~]+$", description="One key makes one job.")
    ] = None,
    traceparent: Annotated[str | None, Header(max_length=200, description="W3C trace context of the caller.")] = None,
) -> JobDetail:
    """Queues a job."""
    document = await _parse(request)
    record, created = await run_in_threadpool(
        submit_document,
        service,
        caller,
        document,
        project,
        priority,
        idempotency_key,
        traceparent or "",
        session=session,
    )
    if not created:
        response.status_code = 200
    response.headers["Location"] = f"/v1/jobs/{record.id}"
    service.scheduler.wake()
    return detail(record)


def submit_document(
    service: Service,
    caller: Caller,
    document: dict[str, Any],
    asked: str | None,
    priority: int,
    key: str | None,
    traceparent: str,
    *,
    session: bool = False,
) -> tuple[JobRecord, bool]:
    """Queues a job; returns it, and whether it is new."""
    project = caller.project_for(asked)
    if service.access.project(project) is None:
        raise ProblemError(404, f"there is no project {project!r}")
    digest = body_hash(document, priority=priority, **({"session": True} if session else {}))
    if key is not None and (known := service.jobs.submitted_before(project, key, digest)):
        return known, False
    spec = validate(document)
    check_code(spec, caller.may(Scope.CODE))
    check_fleet(spec, [fleet.name for fleet in service.fleets.all()])
    job_id, run_dir, spec = prepare(
        spec, service.config.runs_dir, service.uploads, project, service.policy, service.clock()
    )
    if session:
        Mailbox(run_dir).make()
    new = NewJob(
        id=job_id,
        project=project,
        name=spec.name,
        run_dir=str(run_dir),
        spec=spec.model_dump(mode="json"),
        body_hash=digest,
        priority=priority,
        submitter=caller.name,
        idempotency_key=key,
        traceparent=_traceparent(traceparent),
    )
    try:
        record, created = service.jobs.create(new)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    if not created:
        shutil.rmtree(run_dir, ignore_errors=True)
        return record, False
    say(record)
    service.access.note(caller.name, "job.submit", record.id, project, name=record.name, priority=priority)
    return record, True


def _traceparent(text: str) -> str:
    """A caller's trace context; a malformed one starts a new trace, as the standard asks."""
    try:
        return TraceContext.from_traceparent(text).traceparent if text else ""
    except WireError:
        return ""


@router.get("/jobs", response_model=JobPage, responses=errors())
def list_jobs(
    service: ServiceDep,
    caller: Reader,
    state: Annotated[list[JobState] | None, Query(description="Only in one of these states.")] = None,
    name: Annotated[str | None, Query(max_length=64)] = None,
    project: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(pattern=r"^[0-9]{1,18}$", description="`next` of the page before.")] = None,
) -> JobPage:
    """Lists jobs, the newest first."""
    if caller.project is not None and project not in (None, caller.project):
        return JobPage(jobs=[], next=None)
    found = service.jobs.find(
        project=caller.project or project,
        states=state or (),
        name=name,
        before=int(cursor) if cursor else None,
        limit=limit + 1,
    )
    more = len(found) > limit
    found = found[:limit]
    return JobPage(jobs=[Job.of(record) for record in found], next=str(found[-1].number) if more else None)


@router.get("/jobs/{job_id}", response_model=JobDetail, responses=errors(404))
def get_job(service: ServiceDep, caller: Reader, job_id: JobId) -> JobDetail:
    """One job."""
    return detail(visible(service, caller, job_id))


@router.delete("/jobs/{job_id}", status_code=204, response_class=Response, responses=errors(404, 409))
def delete_job(service: ServiceDep, caller: Submitter, job_id: JobId) -> None:
    """Removes a job that has ended, with everything that it wrote."""
    record = service.jobs.change(job_id, lambda status: ask(status, Call.DELETE), project=caller.project)
    if service.config.database_url:
        service.ledgers.store(service.config.database_url).forget(record.id)
    else:  # its ledger lies in its folder
        service.ledgers.forget(service.scheduler.ledger_url(record))
    service.jobs.delete(job_id, caller.project)
    shutil.rmtree(record.run_dir, ignore_errors=True)
    service.access.note(caller.name, "job.delete", record.id, record.project)


def steer(service: Service, caller: Caller, job_id: str, call: Call) -> Job:
    """Asks for a change of a job's state."""
    before = visible(service, caller, job_id)
    record = service.jobs.change(job_id, lambda status: ask(status, call), project=caller.project)
    if record.status != before.status:
        say(record, by=caller.name)
        service.access.note(caller.name, f"job.{call}", record.id, record.project, state=str(record.state))
    service.scheduler.wake()
    return Job.of(record)


@router.post("/jobs/{job_id}/pause", response_model=Job, responses=errors(404, 409))
def pause(service: ServiceDep, caller: Submitter, job_id: JobId) -> Job:
    """Asks a job to leave a checkpoint and to free what it holds; it is `paused` once that is done."""
    return steer(service, caller, job_id, Call.PAUSE)


@router.post("/jobs/{job_id}/resume", response_model=Job, responses=errors(404, 409))
def resume(service: ServiceDep, caller: Submitter, job_id: JobId) -> Job:
    """Queues a paused, cancelled or failed job again; it goes on from its newest checkpoint."""
    return steer(service, caller, job_id, Call.RESUME)


@router.post("/jobs/{job_id}/cancel", response_model=Job, responses=errors(404, 409))
def cancel(service: ServiceDep, caller: Submitter, job_id: JobId) -> Job:
    """Ends a job; where it has made steps, it leaves a checkpoint."""
    return steer(service, caller, job_id, Call.CANCEL)


@router.post("/plan", response_model=dict[str, Any], responses=errors(404, 415), openapi_extra=JOB_BODY)
async def plan(request: Request, service: ServiceDep, caller: Submitter) -> dict[str, Any]:
    """Checks a job as a submission would, and estimates its memory. Nothing is started."""
    document = await _parse(request)
    return await make_plan(service, caller, document)


async def make_plan(service: Service, caller: Caller, document: dict[str, Any]) -> dict[str, Any]:
    """Checks a job, and estimates what it needs."""
    spec = await run_in_threadpool(validate, document)
    check_code(spec, caller.may(Scope.CODE))
    with tempfile.TemporaryDirectory(prefix="plan-", dir=service.config.data_dir) as folder:
        runs = Path(folder) / "runs"
        _, run_dir, _ = await run_in_threadpool(
            prepare, spec, runs, service.uploads, caller.project_for(None), service.policy, service.clock()
        )
        return await _plan_of(run_dir / JOB, folder, service.plans)


@router.get("/jobs/{job_id}/plan", response_model=dict[str, Any], responses=errors(404))
async def plan_of_job(service: ServiceDep, caller: Reader, job_id: JobId) -> dict[str, Any]:
    """What a job was estimated to need, as the plan of its job file says it."""
    record = await run_in_threadpool(visible, service, caller, job_id)
    return await _plan_of(Path(record.run_dir) / JOB, record.run_dir, service.plans)


async def _plan_of(job: Path, folder: str, plans: asyncio.Semaphore) -> dict[str, Any]:
    """The plan of a job file whose files are beside it; ``folder`` is not named in what is wrong with it."""
    # In a process of its own: a hostile chat template may never come to its end. Few at once: each takes a core.
    async with plans:
        return await _ask_plan(job, folder)


async def _ask_plan(job: Path, folder: str) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "nightshift.cli.main", "plan", str(job), "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PLAN_S):
            out, err = await child.communicate()
    except TimeoutError as error:
        raise ProblemError(422, f"the plan was not ready after {_PLAN_S:.0f} s", kind="plan-too-slow") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        text = err.decode(errors="replace").strip().replace(folder, "").removeprefix("error: ")
        raise DocumentError(text or f"the plan ended with code {child.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


def detail(record: JobRecord) -> JobDetail:
    """A job with its job file."""
    return JobDetail(**Job.of(record).model_dump(), spec=record.spec)
