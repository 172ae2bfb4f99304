"""A small HTTP/1.1 client for many long answers at once: its cost per request does not grow with their number.

httpx looks through its whole pool at each request and each end of one: with 256 responses in flight that was measured
at 8 ms of CPU per response, more than all of their tokens. Here idle connections are a stack, and the protocol itself
is h11's, as in httpx. No redirects, no proxies, no cookies: it speaks to rollout servers alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import h11

_CONNECT_TIMEOUT_S = 5.0
_READ = 256 << 10


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
        while True:
            event = await self._connection.event()
            if isinstance(event, h11.EndOfMessage):
                return
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])


class Http1Client:
    """Client of one server.

    Args:
        url: ``http://host:port`` or ``https://host:port``, perhaps with a path before all others.
        headers: sent with each request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = [("Host", parts.netloc.rpartition("@")[2]), *headers.items()]
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        """Closes the idle connections; those in use end with their requests."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], on_sent: Callable[[], None] | None = None
    ) -> AsyncIterator[Answer]:
        """Sends a request and gives its answer; leaving before its end closes the connection.

        Raises:
            ConnectionLostError: the server cannot be reached, or went away.
        """
        connection = await self._connection()
        whole = False
        try:
            fields = [*self._headers, *headers.items(), ("Content-Length", str(len(body)))]
            await connection.send(h11.Request(method="POST", target=self._prefix + path, headers=fields), body)
            if on_sent is not None:
                on_sent()
            head = await connection.event()
            while isinstance(head, h11.InformationalResponse):
                head = await connection.event()
            if not isinstance(head, h11.Response):
                raise ConnectionLostError(f"no answer, but {type(head).__name__}")
            yield Answer(head.status_code, connection)
            whole = connection.renew()
        finally:
            if whole:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable():
                return connection
            connection.close()
        context = ssl.create_default_context() if self._secure else None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        except (OSError, TimeoutError) as error:
            cause = "no connection within 5 s" if isinstance(error, TimeoutError) else f"{error}"
            raise ConnectionLostError(cause) from error
        return _Connection(reader, writer)


class _Connection:
    """One connection with the state of its protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT)

    def usable(self) -> bool:
        """Whether the server has not closed it meanwhile."""
        return not self._reader.at_eof() and self._reader.exception() is None and not self._writer.is_closing()

    def renew(self) -> bool:
        """Makes it ready for the next request, if the last one is over and the server keeps the connection."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return self.usable()

    def close(self) -> None:
        """Closes it at once, whatever is under way."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._writer.transport.abort()

    async def send(self, head: h11.Request, body: bytes) -> None:
        """Sends a request in one piece."""
        parts = [self._state.send(head), self._state.send(h11.Data(data=body)), self._state.send(h11.EndOfMessage())]
        try:
            self._writer.write(b"".join(part for part in parts if part))
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLostError(f"{error}" or type(error).__name__) from error

    async def event(self) -> h11.Event:
        """The next event of the answer."""
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(_READ)
                self._state.receive_data(data)
                if not data and self._state.their_state is h11.SEND_RESPONSE:
                    raise ConnectionLostError("the server closed the connection without an answer")
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectionLostError(f"{error}" or type(error).__name__) from error
        if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise ConnectionLostError("the server closed the connection within its answer")
        return event  # type: ignore[return-value]  # the sentinels are handled above
