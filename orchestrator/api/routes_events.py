"""Events of a job, and uploads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect

from nightshift.cli.runs import EVENTS
from orchestrator.api.models import Upload, UploadInfo, UploadList
from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.routes_jobs import JobId
from orchestrator.api.service import Caller, Reader, Service, ServiceDep, Submitter, still_may, visible
from orchestrator.api.stream import NoLongerError, boundary, events
from orchestrator.api.strict import strict_router
from orchestrator.jobs.states import ENDED, JobState
from orchestrator.store.jobs import UnknownJobError

router = strict_router(prefix="/v1", tags=["events and uploads"])
_PING_S = 15
_DONE = ENDED | {JobState.PAUSED}
Digest = Annotated[str, InPath(pattern=r"^[0-9a-f]{64}$")]
Project = Annotated[str | None, Query(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


@router.get(
    "/jobs/{job_id}/events",
    response_class=EventSourceResponse,
    responses={
        200: {
            "description": "Server-sent events: the data of each is one JSON object with `time`, `kind` and more. The "
            "last one is of kind `end`, once the job has ended or is paused; a stream whose token expires is cut "
            "without it.",
            "content": {"text/event-stream": {}},
        },
        **errors(404),
    },
)
async def job_events(
    service: ServiceDep,
    caller: Reader,
    job_id: JobId,
    last_event_id: Annotated[
        str | None, Header(max_length=20, pattern=r"^[0-9]{0,18}$", description="Go on behind this event.")
    ] = None,
    after: Annotated[int, Query(ge=0, le=2**62, description="The same as a parameter; the header is stronger.")] = 0,
    kind: Annotated[list[str] | None, Query(description="Only these kinds.")] = None,
    follow: Annotated[bool, Query(description="False: only what is there now.")] = True,
) -> EventSourceResponse:
    """What a job says, as it says it."""
    record = await run_in_threadpool(visible, service, caller, job_id)
    path = Path(record.run_dir) / EVENTS
    asked = int(last_event_id) if last_event_id else after
    offset = await run_in_threadpool(boundary, path, asked)
    if service.streams >= service.config.max_streams:
        raise ProblemError(429, "too many event streams are open", headers={"Retry-After": "10"})

    ended, may = partial(finished, service, job_id), partial(still_may, service, caller)

    async def counted() -> Any:
        service.streams += 1
        try:
            async for item in events(path, offset, frozenset(kind or ()), ended, follow=follow, may=may):
                yield item
        except NoLongerError:  # no `end`: the stream is cut, and whoever takes it up again is answered 401
            return
        finally:
            service.streams -= 1

    return EventSourceResponse(counted(), ping=_PING_S)


def finished(service: Service, job_id: str) -> bool:
    """Whether no event of a job comes any more, until somebody resumes it."""
    try:
        return service.jobs.get(job_id).state in _DONE
    except UnknownJobError:
        return True
    except SQLAlchemyError:  # away: the stream goes on
        return False


@router.put(
    "/uploads/{sha256}",
    response_model=Upload,
    status_code=201,
    responses={200: {"model": Upload, "description": "It was there already"}, **errors(404)},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(
    request: Request,
    response: Response,
    service: ServiceDep,
    caller: Submitter,
    sha256: Digest,
    project: Project = None,
) -> Upload:
    """Keeps a file under the SHA-256 of its content, for submissions of the same project."""

    async def pieces() -> AsyncIterator[bytes]:
        async for chunk in request.stream():
            yield chunk

    size, new = await keep_upload(service, caller, project, sha256, pieces())
    if not new:
        response.status_code = 200
    return Upload(sha256=sha256, bytes=size)


async def keep_upload(
    service: Service, caller: Caller, project: str | None, sha256: str, pieces: AsyncIterator[bytes]
) -> tuple[int, bool]:
    """Keeps what comes in; returns its bytes, and whether it is new.

    Raises:
        UploadError: it is too large, or has another hash; nothing is left then.
        ProblemError: 404: there is no such project. 400: whoever sends it went away.
    """
    owner = caller.project_for(project)
    if await run_in_threadpool(service.access.project, owner) is None:
        raise ProblemError(404, f"there is no project {owner!r}")
    receiving = await run_in_threadpool(service.uploads.receive, owner, sha256)
    size = 0
    try:
        async for piece in pieces:
            size += len(piece)
            await run_in_threadpool(receiving.write, piece)
        new = await run_in_threadpool(receiving.finish)
    except ClientDisconnect as error:  # nobody hears it; the log is spared a traceback
        receiving.abort()
        raise ProblemError(400, f"the upload broke off after {size} bytes") from error
    except BaseException:
        receiving.abort()
        raise
    if new:
        await run_in_threadpool(service.access.note, caller.name, "upload", sha256, owner, bytes=size)
    return size, new


@router.get("/uploads", response_model=UploadList, responses=errors(404))
def list_uploads(
    service: ServiceDep,
    caller: Reader,
    project: Project = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> UploadList:
    """The files of a project, the newest first."""
    found = service.uploads.all(caller.project_for(project))
    files = [UploadInfo(sha256=digest, bytes=stat.st_size, time=stat.st_mtime) for digest, stat in found[:limit]]
    return UploadList(
        bytes=sum(stat.st_size for _, stat in found), most_bytes=service.config.max_project_uploads, uploads=files
    )


@router.delete("/uploads/{sha256}", status_code=204, response_class=Response, responses=errors(404))
def delete_upload(service: ServiceDep, caller: Submitter, sha256: Digest, project: Project = None) -> None:
    """Removes a file; jobs that were submitted with it keep theirs."""
    owner = caller.project_for(project)
    if not service.uploads.remove(owner, sha256):
        raise ProblemError(404, f"there is no upload {sha256}")
    service.access.note(caller.name, "upload.delete", sha256, owner)


@router.get("/uploads/{sha256}", response_model=Upload, responses=errors(404))
def find_upload(service: ServiceDep, caller: Reader, sha256: Digest, project: Project = None) -> Upload:
    """Whether a file is there, so that it need not be sent again."""
    found = service.uploads.find(caller.project_for(project), sha256)
    if found is None:
        raise ProblemError(404, f"there is no upload {sha256}")
    return Upload(sha256=sha256, bytes=found.stat().st_size)
