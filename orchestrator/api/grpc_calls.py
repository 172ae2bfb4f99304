"""What the gRPC services share: callers, refusals and values. Their calls are carried out by REST's functions."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import struct_pb2

from orchestrator.api.problems import ProblemError, answer
from orchestrator.api.rate import RateLimit
from orchestrator.api.service import Caller, Service, caller_from, check_scope
from orchestrator.api.strict import check_text
from orchestrator.store.access import Scope

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
#: Bytes in metadata, where text counts up to three times (percent-encoded) and the rest a third more (base64).
_MOST_DETAIL, _MOST_PROBLEM = 600, 3072
Context = Any  # grpc carries no types


class Servicer:
    """Knows who is calling. A subclass says which service it answers for."""

    service_name: str

    def __init__(self, service: Service, rate: RateLimit) -> None:
        self._service = service
        self._rate = rate

    async def caller(self, context: Context, scope: Scope) -> Caller:
        """Who is calling.

        Raises:
            ProblemError: the token is missing or wrong, lacks the scope, or asks too often.
        """
        authorization = metadata(context, "authorization")
        if self._rate.take(self._rate.caller(authorization, context.peer().rpartition(":")[0])):
            raise ProblemError(429, "too many requests")
        kind, _, text = authorization.partition(" ")
        token = text if kind.lower() == "bearer" and text else None
        found = await asyncio.to_thread(caller_from, self._service, token)
        if authorization:
            self._rate.note_good(authorization)
        return check_scope(found, scope)

    def refusals(self, context: Context, method: str) -> Refusals:
        """Ends a call with the problem of what is raised within."""
        return Refusals(context, f"/nightshift.wire.v1.{self.service_name}/{method}")


class Refusals:
    """Ends a call with the problem of what is raised within."""

    def __init__(self, context: Context, path: str) -> None:
        self._context = context
        self._path = path

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            problem = answer(self._path, error)
            code = _CODES.get(problem.status_code, grpc.StatusCode.INTERNAL)
            detail, body = _fitting(json.loads(bytes(problem.body)))
            await self._context.abort(code, detail, (("problem-bin", body),))


def _fitting(problem: dict[str, Any]) -> tuple[str, bytes]:
    """The detail and the whole of a problem, of as much as metadata takes: beyond 8 KiB the call would end without."""
    detail = str(problem["detail"]).encode()[:_MOST_DETAIL].decode(errors="ignore")
    problem["detail"] = detail
    while len(body := json.dumps(problem).encode()) > _MOST_PROBLEM and problem["errors"]:
        problem["errors"].pop()
    return detail, body


def call(scope: Scope) -> Callable[[Any], Any]:
    """Makes a call of a method ``(self, caller, request)`` that runs in a thread."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        async def wrapper(self: Servicer, request: Any, context: Context) -> Any:
            async with self.refusals(context, method.__name__):
                check_texts(request)
                caller = await self.caller(context, scope)
                return await asyncio.to_thread(method, self, caller, request)

        return wrapper

    return decorate


def check_texts(message: Any) -> None:
    """Checks the texts of a request, as :func:`orchestrator.api.strict.check_text` does.

    Raises:
        ProblemError: one is none.
    """
    for field, value in message.ListFields():
        for item in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]:
            if isinstance(item, str):
                check_text(field.name, item)


def metadata(context: Context, name: str) -> str:
    """A value of a call's metadata; "" where it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def limit_of(asked: int, *, otherwise: int, most: int) -> int:
    """Entries of a page; 0 asks for ``otherwise``.

    Raises:
        ProblemError: the number is none of a page.
    """
    if asked < 0 or asked > most:
        text = f"limit must be between 1 and {most}, or 0 for {otherwise}"
        raise ProblemError(422, text, errors=[("limit", f"0 to {most}")])
    return asked or otherwise


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    """A map as protobuf's JSON."""
    made = struct_pb2.Struct()
    made.update(values)
    return made
