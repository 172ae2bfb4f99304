"""As much of vLLM's engine client as the route uses: tokens are given by the test, one call at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nightshift.wire.experience import Floats, Ids, VersionSpan
from services.rollout.compat import Outcome, Sampling


class FakeRequest:
    """Stands in for compat.EngineRequest."""

    def __init__(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, trace: Mapping[str, str] | None, salt: str
    ) -> None:
        self.ids, self.sampling, self.request_id, self.trace = list(ids), sampling, request_id, trace
        self.salt = salt
        self.drawn: list[tuple[int, float]] = []
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            self.drawn.append((len(self.drawn) + 10, -0.5 - len(self.drawn)))

    def end(self, reason: str = "length", spans: list[VersionSpan] | None = None) -> None:
        self.ended.set_result(Outcome(reason, spans))

    async def run(self) -> Outcome:
        try:
            return await self.ended
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def count(self) -> int:
        return len(self.drawn)

    def tokens(self, start: int, end: int) -> tuple[Ids, Floats]:
        part = self.drawn[start:end]
        return np.array([t for t, _ in part], np.int32), np.array([v for _, v in part], np.float32)


class FakeEngineClient:
    """Stands in for compat.EngineClient."""

    def __init__(self, names_weights: bool = True) -> None:
        self.names_weights = names_weights
        self.vllm_version = "0.26.0"
        self.weight_backend = "safetensors"
        self.requests: list[FakeRequest] = []
        self.settled = 0
        self.refuse: Exception | None = None
        self.on_settle: Callable[[], None] | None = None

    def routes(self) -> list[str]:
        return ["/pause"]

    def capabilities(self) -> dict[str, bool]:
        return {"generate": True}

    async def trace_headers(self, headers: Mapping[str, str]) -> dict[str, str] | None:
        return {"traceparent": headers["traceparent"]} if "traceparent" in headers else None

    def request(
        self, ids: Sequence[int], sampling: Sampling, request_id: str, trace: Mapping[str, str] | None, salt: str = ""
    ) -> FakeRequest:
        if self.refuse:
            raise self.refuse
        self.requests.append(FakeRequest(ids, sampling, request_id, trace, salt))
        return self.requests[-1]

    async def settle(self, requests: Sequence[FakeRequest]) -> None:
        self.settled += 1
        if self.on_settle:
            self.on_settle()


class Inner:
    """vLLM's application: writes down what reaches it, answers with a status."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.calls.append((scope["path"], message.get("body", b"")))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


class Call:
    """One HTTP call to an ASGI application, with what it has sent so far."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        authenticated: bool = True,
        query: bytes = b"",
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query,
            "headers": [(key.encode(), value.encode()) for key, value in (headers or {}).items()],
            "app": None,
        }
        if authenticated:
            scope["nightshift.authenticated"] = True
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return next((m["status"] for m in self.messages if m["type"] == "http.response.start"), 0)

    @property
    def body(self) -> bytes:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body")

    @property
    def complete(self) -> bool:
        return any(m["type"] == "http.response.body" and not m.get("more_body") for m in self.messages)
