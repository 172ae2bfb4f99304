"""The wire without sockets and threads: the orchestrator's clients call servers of the same process.

The messages are the same, byte for byte; what is left out is the kernel and gRPC's core. A virtual clock cannot wait
for those, and a process has too few files for both ends of ten thousand connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import urlsplit

import grpc
from grpc.aio import AioRpcError, Metadata

from orchestrator.runner.deadlines import Deadlines
from orchestrator.runner.http1 import ConnectionLostError

App = Callable[[Any, Any, Any], Awaitable[None]]


class _Context:
    """What servicers ask of a context."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the call."""
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with an error."""
        raise AioRpcError(code, Metadata(), Metadata(), details)


class InProcessStub:
    """Stands for the stub of a service whose servicer is in this process. Deadlines are those of the event loop."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._servicer, name)

        async def call(request: Any, **options: Any) -> Any:
            try:
                async with asyncio.timeout(options.get("timeout")):
                    return await method(request, _Context(options.get("metadata", ())))
            except TimeoutError:
                raise AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, Metadata(), Metadata(), "deadline") from None

        return call


class _Exchange:
    """One request to an ASGI application, and its answer."""

    def __init__(self, app: App, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        target = urlsplit(path)
        scope = {
            "type": "http",
            "method": method,
            "path": target.path,
            "query_string": target.query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("in-process", 0),
        }
        self._body: bytes | None = body
        self._gone = asyncio.get_running_loop().create_future()
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.status = 0
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._task.add_done_callback(lambda _: self._messages.put_nowait(None))

    async def begin(self) -> None:
        """Waits for the head of the answer."""
        message = await self._messages.get()
        if message is None:
            raise ConnectionLostError("the server closed the connection without an answer")
        self.status = message["status"]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            message = await self._messages.get()
            if message is None:
                raise ConnectionLostError("the server closed the connection within its answer")
            if message["body"]:
                yield message["body"]
            if not message.get("more_body"):
                return

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def end(self) -> None:
        """Lets the application see that nobody listens any more."""
        if not self._gone.done():
            self._gone.set_result(None)
        await asyncio.gather(self._task, return_exceptions=True)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body}
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self._messages.put_nowait(message)


class InProcessHttp:
    """Stands for :class:`orchestrator.runner.http1.Http1Client`."""

    def __init__(self, app: App, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = headers

    async def close(self) -> None:
        """Nothing is open."""

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str], on_sent: Callable[[], None] | None = None
    ) -> AbstractAsyncContextManager[_Exchange]:
        """As :meth:`request`."""
        return self.request("POST", path, body, headers, on_sent)

    async def stream(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        feed: Callable[[bytes], None],
        deadlines: Deadlines,
        on_sent: Callable[[], None] | None = None,
    ) -> tuple[int, bytes]:
        """Sends a request and feeds its answer."""
        async with deadlines.block(), self.post(path, body, headers, on_sent) as answer:
            if answer.status != 200:
                return answer.status, await answer.read()
            async for piece in answer.chunks():
                feed(piece)
            return answer.status, b""

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[_Exchange]:
        """Sends a request and gives its answer."""
        exchange = _Exchange(self._app, method, path, body, {**self._headers, **headers})
        if on_sent is not None:
            on_sent()
        try:
            await exchange.begin()
            yield exchange
        finally:
            await exchange.end()
