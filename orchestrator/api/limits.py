"""What is checked of every request before anything else: size, rate, and where a browser was sent from."""

from __future__ import annotations

import asyncio
import math

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.api.config import ServiceConfig
from orchestrator.api.problems import respond
from orchestrator.api.rate import RateLimit

_UPLOADS = "/v1/uploads/"
#: Below it nothing is answered without credentials that are good.
_GUARDED = "/v1/"
#: Paths that monitoring asks for and that cost nothing.
_FREE = frozenset({"/healthz", "/readyz"})


class Limits:
    """ASGI middleware.

    A browser sends a page of another host to this service where that host's name was pointed at it (DNS rebinding), or
    where a page makes it (cross-site requests). Without tokens nothing else would hold those off, so that both the host
    and the origin must be known ones then.
    """

    def __init__(self, app: ASGIApp, config: ServiceConfig, rate: RateLimit) -> None:
        self._app = app
        self._config = config
        self._rate = rate
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path: str = scope["path"]
        limit = self._config.max_upload if path.startswith(_UPLOADS) else self._config.max_body
        refusal = self._refuse(scope, headers, path, limit)
        if refusal is not None:
            status, detail, extra = refusal
            await respond(path, status, detail, headers=extra)(scope, receive, send)
            return
        self._open += 1
        credentials = headers.get("authorization", "") if path.startswith(_GUARDED) else ""
        sends = self._noting(credentials, _secured(send))
        try:
            await self._app(scope, _Counted(receive, limit, self._config.body_wait_s), sends)
        finally:
            self._open -= 1

    def _noting(self, credentials: str, send: Send) -> Send:
        """Sends, and notes credentials that got an answer for which they must have been good."""

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and 200 <= message["status"] < 300:
                self._rate.note_good(credentials)
            await send(message)

        return noting if credentials else send

    def _refuse(
        self, scope: Scope, headers: Headers, path: str, limit: int
    ) -> tuple[int, str, dict[str, str] | None] | None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            return 400, "Content-Length is no number", None
        if int(length) > limit:
            return 413, f"the body has {length} bytes and may have {limit}", None
        if not self._config.require_token:
            host = headers.get("host", "")
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
            if name not in self._config.hosts:
                return 403, "this service runs without tokens and answers to loopback names only", None
            origin = headers.get("origin")
            if origin is not None and origin.partition("://")[2] != host:
                return 403, "this service runs without tokens and answers no page of another origin", None
        if path not in _FREE:
            if self._open >= self._config.max_requests:
                return 503, f"{self._open} requests are being answered already", {"Retry-After": "5"}
            client = scope.get("client")
            caller = self._rate.caller(headers.get("authorization", ""), client[0] if client else "")
            wait = self._rate.take(caller)
            if wait:
                return 429, "too many requests", {"Retry-After": str(max(1, math.ceil(wait)))}
        return None


class _Counted:
    """Receives no more than so many bytes, and waits no longer than so for the next ones; the length that was announced
    may be absent or wrong, and who announced it may have gone to sleep."""

    def __init__(self, receive: Receive, limit: int, wait_s: float) -> None:
        self._receive = receive
        self._limit = self._left = limit
        self._wait_s: float | None = wait_s

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout(self._wait_s):
                message = await self._receive()
        except TimeoutError:
            # FastAPI passes on this type alone from within the reading of a body.
            raise HTTPException(408, f"no more of the body came for {self._wait_s:.0f} s") from None
        if not message.get("more_body"):
            self._wait_s = None  # whoever asks further waits for the end of the connection
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, f"the body is larger than {self._limit} bytes")
        return message


def _secured(send: Send) -> Send:
    extra = [
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"x-frame-options", b"DENY"),
        (
            b"content-security-policy",
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
            b"form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
        ),
    ]

    async def secured(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return secured
