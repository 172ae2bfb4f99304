"""A small HTTP/1.1 client for many long answers at once: its cost per request does not grow with their number.

A library costs too much here: of 256 responses in flight, each takes httpx 4.7 ms of CPU (it looks through its whole
pool at each request and each end of one), aiohttp 0.29 ms and this client 0.08 ms, where the whole runner is to have
0.5 ms for a response (``python -m tests.bench.bench_http_client``; docs/figures.md). Idle connections are a stack, one
response at a time has a connection, and the protocol itself is httptools' (llhttp, the parser of Node.js). Connections
of all servers together stay within the limit of open files. No redirects, no proxies, no cookies: it speaks to rollout
servers alone.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import httptools

from orchestrator.runner.deadlines import Deadlines
from orchestrator.runner.files import ROOM, Room

_CONNECT_TIMEOUT_S = 5.0
#: Bytes of an answer that may wait for their reader before the server is held.
_MOST_WAITING = 1 << 20
#: Bytes between two pieces of a body (head, interim answers, trailers), and of an answer that is read whole.
_MOST_BESIDE, _MOST_WHOLE = 1 << 18, 64 << 20


class ConnectionLostError(Exception):
    """No connection, or one that broke before the answer was whole."""


class Answer:
    """Status and body of an answer, while it comes in."""

    def __init__(self, status: int, connection: _Connection) -> None:
        self.status = status
        self._connection = connection

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            ConnectionLostError: it broke off.
        """
        while (data := await self._connection.body()) is not None:
            yield data

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionLostError: it broke off, or does not end.
        """
        chunks, size = [], 0
        async for chunk in self.chunks():
            chunks.append(chunk)
            if (size := size + len(chunk)) > _MOST_WHOLE:
                raise ConnectionLostError(f"an answer of more than {_MOST_WHOLE >> 20} MiB")
        return b"".join(chunks)


class Http1Client:
    """Client of one server.

    Args:
        url: ``http://host:port`` or ``https://host:port``, perhaps with a path before all others.
        headers: sent with each request.
        room: what bounds the connections of all clients together.
    """

    def __init__(self, url: str, headers: Mapping[str, str], room: Room = ROOM) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = _fields({"Host": parts.netloc.rpartition("@")[2], **headers})
        self._room = room
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        """Closes the idle connections; those in use end with their requests."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str], on_sent: Callable[[], None] | None = None
    ) -> AbstractAsyncContextManager[Answer]:
        """As :meth:`request`."""
        return self.request("POST", path, body, headers, on_sent)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """Sends a request and gives its answer; leaving before its end closes the connection.

        Raises:
            ConnectionLostError: the server cannot be reached, or went away.
            ValueError: a header holds a line break.
        """
        data = self._message(method, path, body, headers)
        connection = self._idle_connection() or await self._connection()
        whole = False
        try:
            await connection.send(data)
            if on_sent is not None:
                on_sent()
            status = await connection.status()
            yield Answer(status, connection)
            # A server closes the connection behind a handler that raised, without a word of it in the answer.
            whole = connection.usable() and status < 500
        finally:
            self._let_go(connection, whole)

    async def stream(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        feed: Callable[[bytes], None],
        deadlines: Deadlines,
        on_sent: Callable[[], None] | None = None,
    ) -> tuple[int, bytes]:
        """Sends a request and hands each piece of an answer of status 200 to ``feed`` as it comes in.

        The caller sleeps once for the whole answer, however many pieces it has.

        Args:
            deadlines: what ends the call, a connection included.

        Returns:
            The status, and the body of an answer of another one: its first MiB.

        Raises:
            ConnectionLostError: the server cannot be reached, or went away.
            TimeoutError: of the deadlines.
            ValueError: a header holds a line break.
            Exception: what ``feed`` raised; the connection is closed then.
        """
        data = self._message("POST", path, body, headers)
        connection = self._idle_connection()
        if connection is None:
            async with deadlines.block():
                connection = await self._connection()
                return await self._exchange(connection, data, feed, None, on_sent)
        return await self._exchange(connection, data, feed, deadlines, on_sent)

    async def _exchange(
        self,
        connection: _Connection,
        data: bytes,
        feed: Callable[[bytes], None],
        deadlines: Deadlines | None,
        on_sent: Callable[[], None] | None,
    ) -> tuple[int, bytes]:
        whole = False
        ended = asyncio.get_running_loop().create_future()
        if deadlines is not None:
            deadlines.watch(ended)
        try:
            connection.begin(data, feed, ended, on_sent)
            await ended
            status, rest = connection.status_code, connection.taken()
            whole = connection.usable() and status < 500
            return status, rest
        finally:
            if deadlines is not None:
                deadlines.forget(ended)
            connection.end()
            self._let_go(connection, whole)

    def _message(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{_fields(headers)}"
        if body or method != "GET":
            head += f"Content-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    def _let_go(self, connection: _Connection, whole: bool) -> None:
        """Keeps a connection for the next request where it can have one."""
        if whole:
            self._idle.append(connection)
            self._room.rest(connection)
        else:
            connection.close()

    def _idle_connection(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if self._room.use(connection) and connection.usable():
                return connection
            connection.close()
        return None

    async def _connection(self) -> _Connection:
        while True:
            if (connection := self._idle_connection()) is not None:
                return connection
            if self._room.enter():
                return await self._connect()
            await self._room.wait()

    async def _connect(self) -> _Connection:
        """A new connection, for which there is room."""
        loop = asyncio.get_running_loop()
        connection = _Connection(self._room.leave)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._context)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError | TimeoutError):
                raise
            cause = "no connection within 5 s" if isinstance(error, TimeoutError) else f"{error}"
            raise ConnectionLostError(cause) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection and the answer that comes over it.

    A call that waits holds a future that the next event of the connection ends; there is never more than one.
    """

    def __init__(self, closed: Callable[[], None]) -> None:
        self._closed: Callable[[], None] | None = closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._error: str = ""
        self._waiter: asyncio.Future[None] | None = None
        self._full = False  # the transport's buffer for writing
        self._held = False  # reading
        self._reset()
        self._whole = True

    def _reset(self) -> None:
        self._status = 0
        self._beside = 0  # bytes since the last piece of a body
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._whole = False
        self._keep = False
        self._framed = False  # the answer says itself where it ends
        self._feed: Callable[[bytes], None] | None = None
        self._ended: asyncio.Future[None] | None = None  # of an answer that is fed
        self._sent: Callable[[], None] | None = None  # is called when the request has left
        self._failure: Exception | None = None  # of whoever is fed

    # For the client ---------------------------------------------------------------------------------------------------

    def usable(self) -> bool:
        """Whether the last answer is over and both sides keep the connection."""
        return self._whole and not self._error and not self._chunks and self._open

    def close(self) -> None:
        """Closes it at once, whatever is under way."""
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    async def send(self, data: bytes) -> None:
        """Sends a request."""
        self._reset()
        if self._transport is None or not self._open:
            raise ConnectionLostError(self._error or "the server closed the connection")
        self._transport.write(data)
        while self._full:
            await self._next()

    def begin(
        self,
        data: bytes,
        feed: Callable[[bytes], None],
        ended: asyncio.Future[None],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Sends a request, feeds its answer, and ends the future with it.

        Raises:
            ConnectionLostError: the server has closed the connection.
        """
        self._reset()
        if self._transport is None or not self._open:
            raise ConnectionLostError(self._error or "the server closed the connection")
        self._feed, self._ended, self._sent = feed, ended, on_sent
        self._transport.write(data)
        self._tell_sent()

    @property
    def status_code(self) -> int:
        """Status of the answer; 0 before."""
        return self._status

    def taken(self) -> bytes:
        """What came in of the body and was not fed."""
        taken = b"".join(self._chunks)
        self._chunks.clear()
        self._waiting = 0
        return taken

    def end(self) -> None:
        """Lets go of whoever was fed: idle connections must not keep thousands of answers."""
        self._feed = self._ended = self._sent = self._failure = None

    def _tell_sent(self) -> None:
        sent = self._sent
        if sent is not None and not self._full:
            self._sent = None
            sent()

    async def status(self) -> int:
        """Status of the answer."""
        while not self._status:
            await self._next()
        return self._status

    async def body(self) -> bytes | None:
        """The next piece of the body; None after its end."""
        while not self._chunks:
            if self._whole:
                return None
            await self._next()
        data = self._chunks.popleft()
        self._waiting -= len(data)
        if self._held and self._waiting < _MOST_WAITING and self._transport is not None:
            self._held = False
            self._transport.resume_reading()
        return data

    @property
    def _open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def _next(self) -> None:
        """Waits for an event of the connection."""
        if self._error:
            raise ConnectionLostError(self._error)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._ended is not None:
            self._wake_at_the_end(self._ended)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake_at_the_end(self, ended: asyncio.Future[None]) -> None:
        self._tell_sent()
        if ended.done():
            return
        if self._failure is not None:
            ended.set_exception(self._failure)
        elif self._whole:
            ended.set_result(None)
        elif self._error:
            ended.set_exception(ConnectionLostError(self._error))

    # For the transport ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = transport  # type: ignore[assignment]  # create_connection makes a Transport

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        self._beside += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")
            self.close()
        if self._beside > _MOST_BESIDE:  # the parser keeps a header until it ends
            self._fail(f"more than {_MOST_BESIDE >> 10} KiB that are no body")
            self.close()
        if self._waiting > _MOST_WAITING and not self._held and self._transport is not None:
            self._held = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The server sends no more; the transport closes itself."""
        self._end("the server closed the connection within its answer")

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone; whoever has it closes it."""
        self._end(str(error) if error else "the server closed the connection without an answer")

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._full = False
        self._wake()

    def _end(self, cause: str) -> None:
        if self._status and not self._framed:
            self._whole = True  # an answer without a length ends with its connection
        self._fail(cause if self._status else "the server closed the connection without an answer")
        self._full = False
        self._wake()

    def _fail(self, cause: str) -> None:
        self._error = self._error or cause

    # For the parser ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; one that nobody asked for must not pass for more of the last one, nor for the next."""
        if self._whole:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        """The head of an answer is in; one of 1xx only announces another."""
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status
            self._keep = self._parser.should_keep_alive()
            self._framed = self._framed or status in (204, 304)
        else:
            self._framed = False

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._beside = 0
        if self._feed is None:
            self._chunks.append(data)
            self._waiting += len(data)
        elif self._status != 200:
            if self._waiting + len(data) <= _MOST_WAITING:
                self._chunks.append(data)
                self._waiting += len(data)
        elif self._failure is None:
            try:
                self._feed(data)
            except Exception as error:  # it is the caller's, who hears of it
                self._failure = error

    def on_message_complete(self) -> None:
        """The end of an answer."""
        if not self._status:
            return
        self._whole = True
        if not self._keep:
            self._fail("the server does not keep the connection")


def _fields(headers: Mapping[str, str]) -> str:
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError("a header holds a line break")
    return text
