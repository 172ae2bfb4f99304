"""The job service under load, as JSON: answers and errors of many readers and event streams, and jobs at once.

Run from the repository's folder: ``python -m tests.bench.bench_service [--readers N] [--streams N] [--seconds S]``.

The service is the process that ``nightshift up`` becomes, on loopback, with SQLite; a process that plays a job makes
steps meanwhile. Each reader has a connection of its own, asks for one view after the other as the page does, and pauses
between them; ``--pause 0`` keeps one request of each reader in flight all the time. An error is any answer but 200, a
connection that breaks, and an event that a stream misses, gets twice or out of order. The client shares the machine
with the service, and its time is in the latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.client import Client
from nightshift.client.models import Job
from nightshift.config.load import load_job
from orchestrator.runner.http1 import ConnectionLostError, Http1Client
from tests.contract.test_service_process import write_job
from tests.fakes.service import job
from tests.fakes.up import Up

#: What a reader asks for, one after the other from a place drawn at random.
VIEWS = {
    "jobs": "/v1/jobs?limit=50",
    "job": "/v1/jobs/{job}",
    "metrics": "/v1/jobs/{job}/metrics-history?kind=train&most=1000",
    "rollouts": "/v1/jobs/{job}/rollouts?sort=-step&limit=25",
    "ledger": "/v1/jobs/{job}/ledger",
    "settings": "/v1/jobs/{job}/settings",
    "checkpoints": "/v1/jobs/{job}/checkpoints",
    "events": "/v1/jobs/{job}/events?kind=job&follow=false",
}
_STEP_S = 0.5


@dataclass(slots=True)
class Found:
    """What the clients saw; latencies in seconds, by view."""

    latencies: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VIEWS})
    errors: Counter[str] = field(default_factory=Counter)
    events: int = 0


async def read(client: Http1Client, job_id: str, until: float, pause_s: float, draw: random.Random, out: Found) -> None:
    """One reader, until a moment of the monotonic clock."""
    names = list(VIEWS)
    at = draw.randrange(len(names))
    await asyncio.sleep(draw.random() * min(max(pause_s, 1.0), max(0.0, until - time.monotonic())))
    while time.monotonic() < until:
        name = names[at % len(names)]
        at += 1
        began = time.monotonic()
        try:
            async with client.request("GET", VIEWS[name].format(job=job_id), b"", {}) as answer:
                body = await answer.read()
            if answer.status != 200:
                out.errors[f"{name}: {answer.status} {body[:100].decode(errors='replace')}"] += 1
        except ConnectionLostError as error:
            out.errors[f"{name}: {error}"] += 1
        else:
            out.latencies[name].append(time.monotonic() - began)
        await asyncio.sleep(pause_s * (0.5 + draw.random()))


async def follow(client: Http1Client, job_id: str, until: float, out: Found) -> None:
    """One event stream: each step once, in order, from the first one on."""
    expected = 1
    try:
        async with client.request("GET", f"/v1/jobs/{job_id}/events?kind=step", b"", {}) as answer:
            if answer.status != 200:
                out.errors[f"stream: {answer.status}"] += 1
                return
            rest = b""
            chunks = answer.chunks()
            while (left := until - time.monotonic()) > 0:
                try:
                    chunk = await asyncio.wait_for(anext(chunks), left)
                except TimeoutError:
                    break
                *blocks, rest = (rest + chunk.replace(b"\r\n", b"\n")).split(b"\n\n")
                for block in blocks:
                    data = next((line[6:] for line in block.split(b"\n") if line.startswith(b"data: ")), None)
                    if data is None:  # a ping
                        continue
                    step = json.loads(data).get("step")
                    if step != expected:
                        out.errors[f"stream: event of step {step} where {expected} was next"] += 1
                        return
                    expected += 1
                    out.events += 1
    except (ConnectionLostError, StopAsyncIteration) as error:
        out.errors[f"stream: broke off ({error})"] += 1
        return
    if expected == 1:
        out.errors["stream: no event"] += 1


async def load(up: Up, tokens: list[str], job_id: str, arguments: argparse.Namespace) -> Found:
    """All readers and streams at once."""
    out, draw = Found(), random.Random(arguments.seed)
    until = time.monotonic() + arguments.seconds
    count = arguments.readers + arguments.streams
    clients = [Http1Client(up.url, {"Authorization": f"Bearer {tokens[at % len(tokens)]}"}) for at in range(count)]
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients[: arguments.readers]:
                own = random.Random(draw.random())
                group.create_task(read(client, job_id, until, arguments.pause, own, out))
            for client in clients[arguments.readers :]:
                group.create_task(follow(client, job_id, until, out))
    finally:
        for client in clients:
            await client.close()
    return out


async def submit_at_once(up: Up, token: str, document: dict[str, Any], count: int) -> tuple[list[float], Counter[str]]:
    """Submits so many jobs at once, each one twice under one key, as a client does that lost its answer."""
    latencies: list[float] = []
    answers: Counter[str] = Counter()
    body = json.dumps(document).encode()

    async def submit(at: int) -> None:
        client = Http1Client(up.url, {"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
        began = time.monotonic()
        try:
            async with client.post("/v1/jobs", body, {"Idempotency-Key": f"bench-{at}"}) as answer:
                await answer.read()
            answers[str(answer.status)] += 1
            latencies.append(time.monotonic() - began)
        except ConnectionLostError as error:
            answers[str(error)] += 1
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        for at in range(count):
            group.create_task(submit(at))
            group.create_task(submit(at))
    return latencies, answers


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantiles(seconds: list[float]) -> dict[str, float | int]:
    """Count, median and 99th percentile in milliseconds."""
    if not seconds:
        return {"count": 0}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"count": len(seconds), "p50_ms": round(float(p50) * 1000, 1), "p99_ms": round(float(p99) * 1000, 1)}


def wait_for_step(client: Client, job_id: str, step: int) -> Job:
    """Waits for a job to have made a step."""
    deadline = time.monotonic() + 120
    while (found := client.get(job_id)).step < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"waited 120 s for step {step} of {job_id}: it is {found.state} at step {found.step}")
        time.sleep(0.2)
    return found


def bench(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both parts of the bench against one service."""
    with Up(folder / "data") as up, up.client() as client:
        spec = load_job(write_job(folder / "mine", "live", steps=100_000, step_s=_STEP_S), check_files=False)
        live = client.submit(spec).id
        tokens = [
            client.make_token({"name": f"reader-{at}", "scopes": ["read"], "project": "default"})["token"]
            for at in range(arguments.tokens)
        ]
        wait_for_step(client, live, 1)
        waits = job("at-once")  # of the same uploads as the live one
        admin = (up.folder / "admin-token").read_text().strip()
        began = time.monotonic()
        latencies, answers = asyncio.run(submit_at_once(up, admin, waits, arguments.jobs))
        submitting_s = time.monotonic() - began
        queued = [job.id for job in client.jobs(name="at-once", page=500)]
        before, began = wait_for_step(client, live, 20).step, time.monotonic()
        assert up.process is not None
        cpu = cpu_seconds(up.process.pid)
        found = asyncio.run(load(up, tokens, live, arguments))
        took = time.monotonic() - began
        cpu = cpu_seconds(up.process.pid) - cpu
        after = client.get(live)
        every = [latency for found_ in found.latencies.values() for latency in found_]
        return {
            "readers": arguments.readers,
            "streams": arguments.streams,
            "seconds": arguments.seconds,
            "pause_s": arguments.pause,
            "errors": dict(found.errors),
            "answers_per_s": round(len(every) / took, 1),
            "service_cpu_ms_per_answer": round(1000 * cpu / len(every), 2),
            "service_cores": round(cpu / took, 2),
            "load_average": os.getloadavg()[0],
            "all": quantiles(every),
            "views": {name: quantiles(values) for name, values in found.latencies.items()},
            "events": found.events,
            "job": {"state": after.state, "steps": after.step - before, "steps_per_s": (after.step - before) / took},
            "submissions": {
                "jobs": arguments.jobs,
                "requests": 2 * arguments.jobs,
                "answers": dict(answers),
                "queued": len(queued),
                "queued_once": len(set(queued)) == len(queued) == arguments.jobs,
                "seconds": round(submitting_s, 2),
                **quantiles(latencies),
            },
        }


def main() -> int:
    """Prints the figures; 1 where something failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between a reader's requests")
    parser.add_argument("--tokens", type=int, default=50, help="tokens that the readers share")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # the job may write to its last moment
        found = bench(Path(name), arguments)
    print(json.dumps(found, indent=1))
    return int(bool(found["errors"]) or not found["submissions"]["queued_once"])


if __name__ == "__main__":
    sys.exit(main())
