"""The client of the rollout route against servers that keep, cut, split and refuse."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from orchestrator.runner import http1
from orchestrator.runner.deadlines import Deadlines
from orchestrator.runner.files import Room
from orchestrator.runner.http1 import ConnectionLostError, Http1Client

Script = Callable[[int, bytes], Iterable[bytes | None]]
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class Server:
    """Answers each request with the pieces that a script gives; None closes the connection."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.ended = 0
        self.two_ended = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next(
                    int(v.split(b":")[1]) for v in head.lower().split(b"\r\n") if v.startswith(b"content-length")
                )
                self.requests.append(head + await reader.readexactly(size))
                for piece in self.script(len(self.requests), self.requests[-1]):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            if self.ended == 2:
                self.two_ended.set()
            writer.close()


@asynccontextmanager
async def serving(script: Script, prefix: str = "") -> AsyncIterator[tuple[Server, Http1Client]]:
    server = Server(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}{prefix}"
    client = Http1Client(server.url, {"Authorization": "Bearer t"})
    try:
        yield server, client
    finally:
        await client.close()
        listener.close()


Ask = Callable[[Http1Client], Awaitable[tuple[int, bytes]]]


async def read(client: Http1Client) -> tuple[int, bytes]:
    async with client.post("/r", b"body", {"X": "1"}) as answer:
        return answer.status, await answer.read()


async def fed(client: Http1Client, seconds: float = 30.0) -> tuple[int, bytes]:
    pieces: list[bytes] = []
    status, rest = await client.stream("/r", b"body", {"X": "1"}, pieces.append, Deadlines(seconds))
    return status, b"".join(pieces) + rest


@pytest.fixture(params=[read, fed])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Both ways to take an answer: as its reader wants it, and as it comes."""
    return request.param


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
async def test_a_connection_is_used_again_however_the_answer_is_framed(ask: Ask, answer: bytes) -> None:
    async with serving(lambda number, request: [answer], "/base/") as (server, client):
        assert [await ask(client) for _ in range(3)] == [(200, b"hello")] * 3
        assert server.connections == 1
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/r HTTP/1.1\r\n")
        assert {b"Authorization: Bearer t", b"X: 1", b"Content-Length: 4"} <= set(head.split(b"\r\n"))
        assert body == b"body"


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED])
async def test_an_answer_may_come_byte_by_byte(ask: Ask, answer: bytes) -> None:
    async with serving(lambda number, request: [bytes([b]) for b in answer]) as (_, client):
        assert await ask(client) == (200, b"hello")


async def test_an_interim_answer_is_passed_over(ask: Ask) -> None:
    async with serving(lambda number, request: [b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN]) as (_, client):
        assert await ask(client) == (200, b"hello")


async def test_requests_at_once_have_connections_of_their_own(ask: Ask) -> None:
    async with serving(lambda number, request: [CHUNKED]) as (server, client):
        assert await asyncio.gather(*(ask(client) for _ in range(20))) == [(200, b"hello")] * 20
        assert server.connections == 20
        await ask(client)
        assert server.connections == 20


async def test_a_connection_that_the_server_has_closed_is_not_used_again(ask: Ask) -> None:
    closing = b"HTTP/1.1 503 Away\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno"
    answers: dict[int, list[bytes | None]] = {1: [closing, None], 2: [PLAIN, None], 3: [PLAIN]}
    async with serving(lambda number, request: answers[number]) as (server, client):
        assert await ask(client) == (503, b"no")
        assert await ask(client) == (200, b"hello")
        await asyncio.sleep(0.02)  # the second one kept the connection, and closed it later
        assert await ask(client) == (200, b"hello")
        assert server.connections == 3


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [PLAIN[:20], None],
        [PLAIN[:-2], None],
        [CHUNKED[:-8], None],
        [b"SSH-2.0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
    ],
)
async def test_an_answer_that_breaks_off_is_a_lost_connection(ask: Ask, pieces: list[bytes | None]) -> None:
    async with serving(lambda number, request: pieces) as (server, client):
        with pytest.raises(ConnectionLostError):
            await ask(client)
        server.script = lambda number, request: [PLAIN]
        assert await ask(client) == (200, b"hello")


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536),
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000),
        (CHUNKED[:-2] + b"x: ", b"y" * 65536),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;x=", b"y" * 65536),
    ],
    ids=["one header", "headers", "interim answers", "trailers", "an extension"],
)
async def test_what_never_comes_to_its_body_is_a_lost_connection(ask: Ask, begin: bytes, more: bytes) -> None:
    def endless(number: int, request: bytes) -> Iterator[bytes | None]:
        yield begin
        while True:
            yield more

    async with serving(endless) as (server, client):
        with pytest.raises(ConnectionLostError, match=r"256 KiB that are no body|no HTTP"):
            await asyncio.wait_for(ask(client), 60)
        server.script = lambda number, request: [PLAIN]
        assert await ask(client) == (200, b"hello")


@pytest.mark.parametrize(
    "head", [b"content-length: 1000000000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n", b"\r\n"]
)
async def test_an_answer_without_an_end_is_not_read_whole(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_MOST_WHOLE", 1 << 20)
    chunk = b"x" * 65536
    piece = b"10000\r\n" + chunk + b"\r\n" if b"chunked" in head else chunk

    def endless(number: int, request: bytes) -> Iterator[bytes | None]:
        yield b"HTTP/1.1 200 OK\r\n" + head
        while True:
            yield piece

    async with serving(endless) as (server, client):
        with pytest.raises(ConnectionLostError, match="more than 1 MiB"):
            await asyncio.wait_for(read(client), 60)
        server.script = lambda number, request: [PLAIN]
        assert await read(client) == (200, b"hello")


async def test_what_nobody_asked_for_answers_no_later_request(ask: Ask) -> None:
    stray = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother"
    answers: dict[int, list[bytes | None]] = {1: [PLAIN + stray], 2: [PLAIN], 3: [PLAIN, stray[:30]], 4: [PLAIN]}
    async with serving(lambda number, request: answers[number]) as (_, client):
        for _ in range(4):
            assert await ask(client) == (200, b"hello")
            await asyncio.sleep(0.05)


async def test_two_lengths_are_no_answer(ask: Ask) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello"
    double = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!"
    for refused in (answer, double):
        async with serving(lambda number, request: [refused, None]) as (_, client):  # noqa: B023
            with pytest.raises(ConnectionLostError):
                await ask(client)


async def test_what_came_before_the_break_is_handed_out() -> None:
    got = []

    async def read(client: Http1Client) -> None:
        async with client.post("/r", b"", {}) as answer:
            async for chunk in answer.chunks():
                got.append(chunk)

    async with serving(lambda number, request: [CHUNKED[:-12], None]) as (_, client):
        with pytest.raises(ConnectionLostError):
            await read(client)
    assert b"".join(got) == b"hel"


async def test_who_leaves_before_the_end_closes_the_connection() -> None:
    async with serving(lambda number, request: [CHUNKED[:-10]]) as (server, client):
        for leave in (KeyError, asyncio.CancelledError):
            with pytest.raises(leave):
                async with client.post("/r", b"", {}):
                    raise leave
        await asyncio.wait_for(server.two_ended.wait(), 60)
        assert server.connections == 2


async def test_nobody_there_is_a_lost_connection(ask: Ask) -> None:
    async with serving(lambda number, request: [PLAIN]) as (server, _):
        url = server.url
    client = Http1Client(url, {})
    with pytest.raises(ConnectionLostError):
        await ask(client)
    await client.close()


async def test_the_caller_hears_when_a_request_has_left(ask: Ask) -> None:
    heard, release = asyncio.Event(), asyncio.Event()

    async def answer_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.write(PLAIN)
        writer.close()

    listener = await asyncio.start_server(answer_later, "127.0.0.1", 0)
    client = Http1Client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {})

    async def call() -> bytes:
        async with client.post("/r", b"x", {}, on_sent=heard.set) as answer:
            return await answer.read()

    task = asyncio.create_task(call())
    await asyncio.wait_for(heard.wait(), 60)
    assert not task.done()
    release.set()
    assert await asyncio.wait_for(task, 60) == b"hello"
    await client.close()
    listener.close()


async def test_connections_stay_within_their_room_and_idle_ones_make_way(ask: Ask) -> None:
    room = Room(4)
    async with serving(lambda number, request: [CHUNKED]) as (server, _), serving(lambda n, r: [PLAIN]) as (other, _):
        first, second = Http1Client(server.url, {}, room), Http1Client(other.url, {}, room)
        assert await asyncio.gather(*(ask(first) for _ in range(12))) == [(200, b"hello")] * 12
        assert server.connections == room.open == 4
        assert await asyncio.gather(*(ask(second) for _ in range(12))) == [(200, b"hello")] * 12
        assert other.connections == 4
        assert room.open <= 4
        assert await ask(first) == (200, b"hello")
        gone = Http1Client("http://127.0.0.1:1", {}, room)
        for _ in range(6):
            with pytest.raises(ConnectionLostError):
                await ask(gone)
        assert room.open <= 4
        for client in (first, second):
            await client.close()
        assert room.open == 0


async def test_who_is_cancelled_while_it_waits_for_room_takes_none(ask: Ask) -> None:
    room, release = Room(1), asyncio.Event()

    async def answer_later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"body")
            await release.wait()
            writer.write(PLAIN)

    listener = await asyncio.start_server(answer_later, "127.0.0.1", 0)
    client = Http1Client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {}, room)
    holding, waiting, last = (asyncio.create_task(ask(client)) for _ in range(3))
    await asyncio.sleep(0.05)
    waiting.cancel()
    release.set()
    assert await asyncio.wait_for(holding, 60) == (200, b"hello")
    assert await asyncio.wait_for(last, 60) == (200, b"hello")
    assert waiting.cancelled()
    assert room.open == 1
    await client.close()
    listener.close()


async def test_an_answer_without_a_length_ends_with_its_connection(ask: Ask) -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\nhello"
    async with serving(lambda number, request: [endless, None]) as (server, client):
        assert [await ask(client) for _ in range(2)] == [(200, b"hello")] * 2
        assert server.connections == 2


async def test_a_long_answer_waits_for_its_reader() -> None:
    size = 16 << 20
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode()
    left: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        for at in range(16):
            writer.write(bytes([at]) * (1 << 20))
            await writer.drain()
            left.append(at)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = Http1Client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", {})
    async with client.post("/r", b"", {}) as response:
        await asyncio.sleep(0.2)
        assert len(left) < 16, "nobody read, and everything was taken in"
        body = await response.read()
    assert len(body) == size
    assert body[-1] == 15
    await client.close()
    listener.close()


async def test_a_header_with_a_line_break_is_refused() -> None:
    client = Http1Client("http://127.0.0.1:1", {})
    with pytest.raises(ValueError, match="line break"):
        async with client.post("/r", b"", {"X": "1\r\nY: 2"}):
            pass
    with pytest.raises(ValueError, match="line break"):
        Http1Client("http://127.0.0.1:1", {"X": "1\n"})


async def test_what_is_fed_came_in_before_the_break() -> None:
    got: list[bytes] = []
    async with serving(lambda number, request: [CHUNKED[:-12], None]) as (_, client):
        with pytest.raises(ConnectionLostError):
            await client.stream("/r", b"", {}, got.append, Deadlines(30.0))
    assert b"".join(got) == b"hel"


async def test_who_refuses_what_it_is_fed_closes_the_connection() -> None:
    def refuse(data: bytes) -> None:
        raise KeyError(data)

    async with serving(lambda number, request: [CHUNKED]) as (server, client):
        with pytest.raises(KeyError, match="hel"):
            await client.stream("/r", b"", {}, refuse, Deadlines(30.0))
        assert await fed(client) == (200, b"hello")
        assert server.connections == 2


@pytest.mark.parametrize("known", [False, True], ids=["new connection", "used again"])
@pytest.mark.parametrize("how", ["late", "broken off", "cancelled"])
async def test_a_wait_for_an_answer_ends(how: str, known: bool) -> None:
    async with serving(lambda number, request: [PLAIN] if known and number == 1 else [CHUNKED[:-12]]) as (
        server,
        client,
    ):
        if known:
            assert await fed(client) == (200, b"hello")
        deadlines, got = Deadlines(0.2 if how == "late" else 3600.0), asyncio.Event()
        wait = asyncio.create_task(client.stream("/r", b"", {}, lambda data: got.set(), deadlines))
        await asyncio.wait_for(got.wait(), 30)
        if how == "broken off":
            deadlines.expire()
        elif how == "cancelled":
            wait.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else TimeoutError):
            await asyncio.wait_for(asyncio.shield(wait), 30)
        deadlines.close()
        server.script = lambda number, request: [PLAIN]
        assert await fed(client) == (200, b"hello")
        assert server.connections == 2


async def test_each_of_many_waits_ends_in_its_own_time() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(0.05)
    began = loop.time()
    waits = []
    for _ in range(20):
        waits.append(loop.create_future())
        deadlines.watch(waits[-1])
    for wait in waits[::3]:
        deadlines.forget(wait)
    for at, wait in enumerate(waits):
        if at % 3:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(wait), 30)
            assert loop.time() - began >= 0.05
    assert not any(wait.done() for wait in waits[::3])
    deadlines.close()


async def test_the_body_of_a_refusal_is_not_fed() -> None:
    refusal = b"HTTP/1.1 400 Bad\r\ncontent-length: 5\r\n\r\nwrong"
    got: list[bytes] = []
    async with serving(lambda number, request: [refusal]) as (server, client):
        for _ in range(2):
            assert await client.stream("/r", b"", {}, got.append, Deadlines(30.0)) == (400, b"wrong")
        assert server.connections == 1
    assert not got


async def test_an_idle_connection_keeps_nothing_of_its_last_answer() -> None:
    class Taker:
        def take(self, data: bytes) -> None:
            """Takes it."""

    async with serving(lambda number, request: [CHUNKED]) as (server, client):
        taker = Taker()
        gone = weakref.ref(taker)
        assert await client.stream("/r", b"", {}, taker.take, Deadlines(30.0)) == (200, b"")
        del taker
        gc.collect()
        assert gone() is None
        assert await fed(client) == (200, b"hello")
        assert server.connections == 1
