"""What a streamed response costs the client in CPU, by client and by the number in flight, as JSON.

Run from the repository's folder: ``python -m tests.bench.bench_http_client [--flight N ...] [--responses R]``.

A process of its own answers each POST with 8 chunks of 512 bytes, 5 ms apart: frames of a response. The client draws R
responses with N in flight, on libuv's loop as the runner does. Its CPU time over R is what counts, so that other work
on the machine does not. Rounds alternate between the clients; medians. httpx and, where it is installed, aiohttp stand
for a well-kept library in place of ``orchestrator/runner/http1.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import httpx
import uvloop

from orchestrator.runner.deadlines import Deadlines
from orchestrator.runner.http1 import Http1Client

CHUNKS, SIZE, PAUSE_S = 8, 512, 0.005
BODY = b"x" * 1024
Draw = Callable[[], Awaitable[int]]


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    chunk = b"%x\r\n" % SIZE + b"y" * SIZE + b"\r\n"
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(BODY))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(CHUNKS):
                await asyncio.sleep(PAUSE_S)
                writer.write(chunk)
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(port: Connection) -> None:
    """Answers until it is killed; tells its port."""

    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def measured(draw: Draw, flight: int, responses: int) -> float:
    """CPU milliseconds of this process for one response."""
    left = iter(range(responses))

    async def work() -> None:
        for _ in left:
            assert await draw() == CHUNKS * SIZE

    await asyncio.gather(*(draw() for _ in range(flight)))  # connections are there
    began = time.process_time()
    await asyncio.gather(*(work() for _ in range(flight)))
    return 1000 * (time.process_time() - began) / responses


async def ours(url: str, flight: int, responses: int) -> float:
    client, deadlines = Http1Client(url, {}), Deadlines(60.0)

    async def draw() -> int:
        taken = 0

        def feed(data: bytes) -> None:
            nonlocal taken
            taken += len(data)

        await client.stream("/r", BODY, {}, feed, deadlines)
        return taken

    try:
        return await measured(draw, flight, responses)
    finally:
        deadlines.close()
        await client.close()


async def with_httpx(url: str, flight: int, responses: int) -> float:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, trust_env=False) as client:

        async def draw() -> int:
            async with client.stream("POST", "/r", content=BODY) as answer:
                return sum([len(chunk) async for chunk in answer.aiter_raw()])

        return await measured(draw, flight, responses)


async def with_aiohttp(url: str, flight: int, responses: int) -> float:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(60.0)) as client:

        async def draw() -> int:
            async with client.post("/r", data=BODY) as answer:
                return sum([len(chunk) async for chunk in answer.content.iter_any()])

        return await measured(draw, flight, responses)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flight", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--responses", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    clients: dict[str, Any] = {"http1": ours, "httpx": with_httpx}
    if importlib.util.find_spec("aiohttp") is not None:
        clients["aiohttp"] = with_aiohttp
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    found: dict[str, dict[int, list[float]]] = {name: {flight: [] for flight in given.flight} for name in clients}
    for _ in range(given.rounds):
        for flight in given.flight:
            for name, client in clients.items():
                found[name][flight].append(uvloop.run(client(url, flight, given.responses)))
    server.kill()
    medians = {
        name: {str(flight): round(statistics.median(values), 3) for flight, values in by_flight.items()}
        for name, by_flight in found.items()
    }
    print(json.dumps({"cpu_ms_per_response": medians, "responses": given.responses, "rounds": given.rounds}))


if __name__ == "__main__":
    main()
