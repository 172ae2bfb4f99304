"""Errors as RFC 9457 problem details."""

from __future__ import annotations

import errno
import http
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from nightshift.config.live import SettingsError
from nightshift.config.messages import explain_value
from nightshift.wire.errors import BadInputError, NightshiftError
from orchestrator.jobs.document import DocumentError
from orchestrator.jobs.states import StateConflictError
from orchestrator.jobs.submission import CodeForbiddenError
from orchestrator.jobs.uploads import UploadError
from orchestrator.store.access import UnknownTokenError
from orchestrator.store.fleets import FleetInUseError, UnknownFleetError
from orchestrator.store.jobs import IdempotencyError, QuotaError, UnknownJobError

_log = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"
#: Characters of a detail, of a message and of a field's name, and most fields: what was sent comes back in part only.
_DETAIL, _MESSAGE, _NAME, _FIELDS = 4000, 1000, 200, 100
#: Statuses that any request may be answered with.
_ALWAYS = (400, 401, 403, 408, 413, 422, 429, 500, 503)


class FieldProblem(BaseModel):
    """One field that is wrong."""

    field: str = Field(description="Dotted path in the body, or the parameter's name; empty for the whole.")
    message: str = Field(description="What was wrong, and what would be right.")


class Problem(BaseModel):
    """What went wrong (RFC 9457)."""

    type: str = Field(description="Names the kind of problem.", examples=["urn:nightshift:problem:conflict"])
    title: str
    status: int
    detail: str = Field(description="One sentence: what was wrong, and what would be right.")
    instance: str = Field(description="Path of the request.")
    role: str = Field(default="", description="The role that the problem concerns.")
    errors: list[FieldProblem] = Field(default_factory=list, description="Each field that is wrong.")
    state: str | None = Field(default=None, description="Of a job whose state does not allow the call.")


class ProblemError(Exception):
    """Ends a request with a problem."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        kind: str = "",
        headers: dict[str, str] | None = None,
        errors: list[tuple[str, str]] | None = None,
        state: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.headers = headers
        self.errors = errors or []
        self.state = state


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route: problems with these statuses, and those that any route may answer with."""
    return {
        status: {
            "model": Problem,
            "description": http.HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*_ALWAYS, *statuses})
    }


def respond(
    request_path: str,
    status: int,
    detail: str,
    *,
    kind: str = "",
    role: str = "",
    fields: list[tuple[str, str]] | None = None,
    state: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """A problem as a response."""
    title = http.HTTPStatus(status).phrase
    problem = Problem(
        type=f"urn:nightshift:problem:{kind or title.lower().replace(' ', '-')}",
        title=title,
        status=status,
        detail=_cut(detail, _DETAIL),
        instance=_cut(request_path, _NAME),
        role=role,
        errors=[
            FieldProblem(field=_cut(field, _NAME), message=_cut(message, _MESSAGE))
            for field, message in (fields or [])[:_FIELDS]
        ],
        state=state,
    )
    content = problem.model_dump(exclude_none=True)
    return JSONResponse(content, status, headers=headers, media_type=MEDIA_TYPE)


def _cut(text: str, most: int) -> str:
    # Half a pair of UTF-16, which JSON can spell and UTF-8 cannot, would else end the answer itself.
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode(errors="replace").decode()


def status_of(error: NightshiftError) -> tuple[int, str]:
    """HTTP status and kind of one of our errors."""
    match error:
        case StateConflictError():
            return 409, "state-conflict"
        case UnknownJobError():
            return 404, "no-such-job"
        case UnknownTokenError():
            return 404, "no-such-token"
        case UnknownFleetError():
            return 404, "no-such-fleet"
        case FleetInUseError():
            return 409, "fleet-in-use"
        case IdempotencyError():
            return 422, "idempotency-key-reused"
        case QuotaError():
            return 429, "quota"
        case CodeForbiddenError():
            return 403, "code-not-allowed"
        case DocumentError() | UploadError():
            return error.status, "bad-upload" if isinstance(error, UploadError) else "bad-document"
        case BadInputError():
            return 422, "bad-input"
    return 500, "internal"


def answer(path: str, error: BaseException) -> JSONResponse:
    """The problem that an error stands for. What was not foreseen goes to the log, and is a 500."""
    match error:
        case ProblemError():
            return respond(
                path,
                error.status,
                error.detail,
                kind=error.kind,
                fields=error.errors,
                state=error.state,
                headers=error.headers,
            )
        case NightshiftError():
            return _ours(path, error)
        case ClientDisconnect():  # nobody hears it, and nothing is wrong here
            return respond(path, 400, "the connection ended before the body did", kind="disconnected")
        case DataError() | IntegrityError():  # it answers, and takes no such value: a fault of ours, not its absence
            pass
        case SQLAlchemyError():
            _log.warning("%s: database: %s", path, str(error).splitlines()[0])
            if "disk is full" in str(error):  # SQLite's words
                detail, more = "the service's disk is full: its database takes nothing in", {"Retry-After": "60"}
                return respond(path, 503, detail, kind="disk-full", headers=more)
            detail = "the service's database is away; running jobs go on, and nothing is lost: try again"
            return respond(path, 503, detail, kind="database-away", headers={"Retry-After": "5"})
        case OSError():
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            _log.warning("%s: %s", path, error)
            detail = "the service's disk is full" if full else f"the service cannot use its files: {error.strerror}"
            kind = "disk-full" if full else "files"
            return respond(path, 503, detail, kind=kind, headers={"Retry-After": "60"})
    _log.error("%s: an error that was not foreseen", path, exc_info=error)
    return respond(path, 500, "an error that was not foreseen; the service's log has it")


def _ours(path: str, error: NightshiftError) -> JSONResponse:
    status, kind = status_of(error)
    if status == 500:
        _log.error("%s: %s", path, error)
    state = str(error.state) if isinstance(error, StateConflictError) else None
    fields = error.problems if isinstance(error, DocumentError | SettingsError) else None
    detail = f"{error.message}. {error.fix}" if error.fix else error.message
    headers = {"Retry-After": "30"} if status == 429 else None
    return respond(path, status, detail, kind=kind, role=error.role, fields=fields, state=state, headers=headers)


def install(app: FastAPI) -> None:
    """Makes every error of an application a problem."""

    async def any_error(request: Request, error: Exception) -> JSONResponse:
        return answer(request.url.path, error)

    for kind in (ProblemError, NightshiftError, SQLAlchemyError, OSError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, any_error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        items = error.errors()
        broken = next((item for item in items if item["type"] == "json_invalid"), None)
        if broken is not None:
            detail = f"the body is not valid JSON: {broken.get('ctx', {}).get('error', broken['msg'])}"
            return respond(request.url.path, 400, detail, kind="bad-document")
        named, fields = wrong_values(items)
        return respond(request.url.path, 422, named, kind="bad-parameter", fields=fields)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = f"there is nothing at {request.url.path}"
        elif error.status_code == 405:
            detail = f"{request.method} is not possible at {request.url.path}"
        headers = dict(error.headers) if error.headers else None
        if error.status_code == 405:
            headers = {"Allow": ", ".join(_methods_at(request))}
        return respond(request.url.path, error.status_code, detail, headers=headers)


def wrong_values(items: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Of pydantic's errors about a request: one sentence, and each wrong field with what is wrong and what is right."""
    fields = [(_field(item["loc"]), explain_value(item)) for item in items]
    return "; ".join(f"{field} {message}" if field else f"the body {message}" for field, message in fields[:5]), fields


def _methods_at(request: Request) -> list[str]:
    """Methods that a path takes, of all routes: the router names those of the first one alone."""
    found: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


def _field(location: tuple[int | str, ...]) -> str:
    parts = [part for part in location if part not in ("body", "query", "path", "header")]
    return ".".join(str(part) for part in parts)
