"""Jobs that are driven step by step: requests go into the run's mailbox, answers come out of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

from fastapi import Path as InPath
from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from nightshift.wire import codec
from nightshift.wire.errors import WireError
from nightshift.wire.mailbox import Mailbox
from orchestrator.api.models import Asked
from orchestrator.api.problems import ProblemError, errors
from orchestrator.api.routes_jobs import JobId
from orchestrator.api.service import Caller, Service, ServiceDep, Submitter, visible
from orchestrator.api.strict import strict_router
from orchestrator.jobs.states import ENDED, JobState, StateConflictError

router = strict_router(prefix="/v1", tags=["sessions"])
_POLL_S = 0.03
_KINDS = ("rollout", "loss", "step", "discard", "close")
_MSGPACK = "application/x-msgpack"
_BINARY = {_MSGPACK: {"schema": {"type": "string", "format": "binary"}}}


def _mailbox(service: Service, caller: Caller, job_id: str) -> Mailbox:
    record = visible(service, caller, job_id)
    box = Mailbox(Path(record.run_dir))
    if not box.exists:
        raise ProblemError(404, f"job {job_id} was not submitted with session=true", kind="no-session")
    if record.state in ENDED or record.state is JobState.CANCELLING:
        why = f": {record.error}" if record.error else ""
        raise StateConflictError(f"the job is {record.state}, and answers no more{why}", record.state)
    return box


@router.post(
    "/jobs/{job_id}/session",
    name="ask_session",
    status_code=202,
    response_model=Asked,
    responses=errors(404, 409),
    openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
)
async def ask(request: Request, service: ServiceDep, caller: Submitter, job_id: JobId) -> Asked:
    """Asks a driven job for something: a msgpack map with `kind` rollout, loss, step, discard or close."""
    body = await request.body()
    try:
        message = codec.unpack(body)
    except WireError as error:
        raise ProblemError(400, f"the body is no msgpack message: {error.message}") from error
    if not isinstance(message, dict) or message.get("kind") not in _KINDS:
        raise ProblemError(422, f"the message must be a map with kind {', '.join(_KINDS)}")
    box = await run_in_threadpool(_mailbox, service, caller, job_id)

    def post() -> int:
        with service.settings_lock:
            return box.post(body)

    return Asked(number=await run_in_threadpool(post))


@router.get(
    "/jobs/{job_id}/session/{number}",
    name="session_answer",
    response_class=Response,
    responses={
        200: {"description": "The answer", "content": _BINARY},
        204: {"description": "Not yet: ask again"},
        **errors(404, 409),
    },
)
async def answer(
    service: ServiceDep,
    caller: Submitter,
    job_id: JobId,
    number: Annotated[int, InPath(ge=1, le=10**9)],
    wait_s: Annotated[float, Query(ge=0, le=30, description="How long to wait for it.")] = 20.0,
) -> Response:
    """The answer to a request."""
    until = time.monotonic() + wait_s
    while True:
        # The answer before the state: a job that ended may have answered before.
        record = await run_in_threadpool(visible, service, caller, job_id)
        box = Mailbox(Path(record.run_dir))
        data = await run_in_threadpool(box.answer, number) if box.exists else None
        if data is not None:
            return Response(data, media_type=_MSGPACK)
        await run_in_threadpool(_mailbox, service, caller, job_id)
        deadline = min(until, time.monotonic() + 1.0)  # the state is looked at once a second
        while data is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            data = box.answer(number)
        if data is not None:
            return Response(data, media_type=_MSGPACK)
        if time.monotonic() >= until:
            return Response(status_code=204)
