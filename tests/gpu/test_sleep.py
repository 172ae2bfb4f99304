"""Server and trainer take turns with the memory of one GPU: what is given back, and that nothing is lost by it.

Run where there is a GPU, with a tokenizer's folder in NIGHTSHIFT_TEST_TOKENIZER: pytest -m gpu tests/gpu/test_sleep.py
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.config.load import load_job
from nightshift.gpu import ask_driver
from nightshift.wire.scoring import SequenceInput
from orchestrator.runner.answers import GenerateRequest
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.health import PROBE_LIMITS
from orchestrator.runner.server import Proof, Server
from orchestrator.runner.trainer import Publication
from services.rollout.launch import VllmServer
from tests.gpu.jobs import run_steps, write_job

pytestmark = pytest.mark.gpu
GIB = 1 << 30
KV_GIB = 20
PROMPT = np.arange(100, 132, dtype=np.int32)
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"max_prompt_length": 64},
    "pipeline": {"max_staleness": 0},
    "rollout": {
        "sleep_mode": True,
        "batch_size": 8,
        "n": 4,
        "max_response_length": 64,
        "min_response_length": 64,
        "kv_cache_gib": KV_GIB,
        "max_num_seqs": 64,
    },
    "trainer": {"max_tokens_per_micro_batch": 2048, "learning_rate": 1e-4},
}


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[VllmServer]:
    spec = load_job(write_job(tmp_path, model, 1, **SETTINGS))
    server = VllmServer(spec, store=tmp_path, log_path=tmp_path / "rollout.log", device="cuda", gpu=0)
    server.start()
    yield server
    server.stop()


def used() -> int:
    """Bytes of the first device that are taken."""
    driver = ask_driver()
    assert driver is not None
    return driver.gpus[0].memory - driver.gpus[0].free


async def drawn(engine: Engine, name: str) -> tuple[list[int], np.ndarray]:
    """A greedy response, and the log-probs of its tokens."""
    answer = await engine.generate(GenerateRequest(name, PROMPT, 32, 0.0, (), min_tokens=32, ignore_eos=True))
    return answer.response_ids.tolist(), await engine.score(PROMPT, answer.response_ids)


def test_a_server_gives_its_memory_back_and_computes_as_before_once_it_is_awake(
    server: VllmServer, model: Path, tmp_path: Path
) -> None:
    """Sleep, wake, push by IPC, proof, three times; the weights of the second are others."""
    from services.trainer.config import RankConfig
    from services.trainer.rank import TrainerRank
    from tests.gpu.generation import _loss
    from tests.gpu.trainer import make_samples

    rank = TrainerRank(
        RankConfig(
            model_path=str(model),
            dtype="bfloat16",
            max_tokens=4096,
            device="cuda",
            rollout_dtype="bfloat16",
            weight_backend="ipc",
            deterministic=False,
            share_prompts=False,
            takes_turns=True,
        )
    )
    rng = np.random.default_rng(3)
    probe = [
        SequenceInput(
            id=str(at),
            prompt_ids=rng.integers(3, 40000, 32).astype(np.int32),
            response_ids=rng.integers(3, 40000, 32).astype(np.int32),
        )
        for at in range(2)
    ]

    def publication(version: str) -> Publication:
        values = [dict(item) for item in rank.log_probs(probe, exact=True)]
        made = rank.publish(tmp_path)  # last, since it gives back what no tensor holds
        assert made is not None
        return Publication(
            version, made.backend, made.update_info, made.digest, made.bytes, values, made.changed_fraction, 0.0
        )

    async def check() -> None:
        address = EngineAddress(server.name, server.url, server.token, server.incarnation, "ipc")
        one = Server(address, 120.0)
        proof = Proof(probe, PROBE_LIMITS["bfloat16"], sleeps=True)
        first = publication("run/0/0")
        await one.bring(first, proof)
        assert one.proved(first)
        before = await drawn(one.engine, "before")
        for at in range(1, 4):
            awake = used()
            began = time.perf_counter()
            await one.lull(60.0)
            slept = time.perf_counter() - began
            asleep = used()
            assert await one.engine.healthy()
            print(f"awake {awake / GIB:.2f} GiB, asleep {asleep / GIB:.2f} GiB, sleep {slept:.3f} s", flush=True)
            assert awake - asleep > 0.95 * KV_GIB * GIB
            if at == 2:
                samples = make_samples(32, rank.vocab_size, rng)
                rank.update(samples, _loss(samples), 1e-3)
            next_one = publication(f"run/0/{at}")
            pause = await one.bring(next_one, proof)
            assert one.proved(next_one)
            print(f"woken in {one.engine.woke_s:.3f} s of a pause of {pause:.3f} s", flush=True)
            assert abs(used() - awake) < 2 * GIB
            after = await drawn(one.engine, f"after{at}")
            if at == 1:  # the same weights
                assert after[0] == before[0]
                assert np.abs(after[1] - before[1]).max() < 0.05
            if at == 2:  # others, under which the most likely tokens may still be the same
                known = await one.engine.score(PROMPT, np.array(before[0], np.int32))
                assert np.abs(known - before[1]).max() > 0.05
        await one.engine.close()

    asyncio.run(check())


class Memory(threading.Thread):
    """Reads how much of the device is taken, until it is closed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[float, int]] = []
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0", "-lms", "20"]
        self._asked = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)

    def run(self) -> None:
        assert self._asked.stdout is not None
        for line in self._asked.stdout:
            self.seen.append((time.time(), int(line) << 20))

    def close(self) -> None:
        self._asked.terminate()
        self._asked.wait(30)
        self.join(30)


def test_a_job_trains_while_its_server_sleeps(model: Path, tmp_path: Path) -> None:
    memory = Memory()
    memory.start()
    try:
        _, events, output = run_steps(write_job(tmp_path, model, 6, **SETTINGS), 6, 240)
    finally:
        memory.close()
    steps = [event for event in events if event["kind"] == "step"]
    assert [event for event in events if event["kind"] == "warning" and "left" not in event["message"]] == [], output
    assert [event for event in events if event["kind"] == "role" and event["state"] in ("suspect", "dead")] == []
    for step in steps:
        print({name: round(step["metrics"][f"timing/{name}"], 3) for name in ("sleep", "wake", "sync", "step")})
        assert step["metrics"]["timing/sleep"] > 0
        assert step["metrics"]["timing/wake"] > 0
        assert step["metrics"]["log_ratio/abs_mean"] < 0.05
        assert step["metrics"]["sync/changed_fraction"] > 0.1
    taken = [size for at, size in memory.seen if steps[0]["time"] < at < steps[-1]["time"]]
    print(f"taken of the device: {min(taken) / GIB:.2f} to {max(taken) / GIB:.2f} GiB", flush=True)
    assert max(taken) - min(taken) > 0.8 * KV_GIB * GIB
