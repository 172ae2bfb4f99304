"""Generation at 256 streams through three forms of request, and the proof of a weight push, on one server.

python -m tests.gpu.generation MODEL WORK [--rounds 3] [--push 1]

Prints JSON lines: with ``--push 1`` how far the server's log-probs are from the trainer's after a push, and whether a
push that did nothing is noticed; then tokens/s of each form and round, in alternating order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from nightshift.config.load import load_job
from nightshift.gpu import Device
from nightshift.wire import codec
from nightshift.wire.frames import FrameReader
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.health import PROBE_LIMITS, probe_failure
from services.rollout.launch import VllmServer
from tests.gpu.jobs import PROMPT_TOKENS, PROMPTS, RESPONSE_TOKENS, SAMPLES, write_job

FORMS = ("route", "generate with log-probs", "generate without")


def _request(form: str, prompt: list[int], name: str, tokens: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request."""
    common = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    if form == "route":
        body = {"request_id": name, "token_ids": np.array(prompt, np.int32), "flush_tokens": 64, "seed": None}
        return "/nightshift/v1/generate", {"data": codec.pack(body | common)}
    sampling = common | {"detokenize": False} | ({"logprobs": 0} if form == FORMS[1] else {})
    return "/inference/v1/generate", {"json": {"token_ids": prompt, "sampling_params": sampling}}


async def draw_all(server: VllmServer, form: str, seed: int, tokens: int = RESPONSE_TOKENS) -> float:
    """Seconds until the last of 256 responses was read."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 40000, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    counted = []

    async with aiohttp.ClientSession(
        server.url,
        headers={"Authorization": f"Bearer {server.token}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=200),
    ) as session:

        async def one(index: int) -> None:
            path, body = _request(form, prompts[index // SAMPLES], f"{form[:5]}{seed}.{index}", tokens)
            async with session.post(path, **body) as answer:
                data = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path} answered {answer.status}: {data[:300]!r}")
            counted.append(data)

        began = time.perf_counter()
        await asyncio.gather(*[one(index) for index in range(PROMPTS * SAMPLES)])
        seconds = time.perf_counter() - began
    if form == "route":
        assert all(sum(len(frame.ids) for frame in FrameReader().feed(data)) == tokens for data in counted)
        assert all(np.isfinite(frame.logprobs).all() for data in counted for frame in FrameReader().feed(data))
    else:
        assert len(json.loads(counted[0])["choices"][0]["token_ids"]) == tokens
    return seconds


def measure_generation(server: VllmServer, rounds: int) -> None:
    """All forms in turn, each round in the other order."""
    for form in FORMS:
        asyncio.run(draw_all(server, form, 1, 32))
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for round_ in range(rounds):
        for form in FORMS if round_ % 2 == 0 else FORMS[::-1]:
            seconds = asyncio.run(draw_all(server, form, 10 + round_))
            found[form].append(round(PROMPTS * SAMPLES * RESPONSE_TOKENS / seconds))
            print(json.dumps({"form": form, "round": round_, "tokens_per_second": found[form][-1]}), flush=True)
    medians = {form: statistics.median(values) for form, values in found.items()}
    print(
        json.dumps(
            {
                "generation": found,
                "route / generate with log-probs": round(medians[FORMS[0]] / medians[FORMS[1]], 3),
                "route / generate without": round(medians[FORMS[0]] / medians[FORMS[2]], 3),
            }
        ),
        flush=True,
    )


async def measure_push(server: VllmServer, model: Path, work: Path, device: Device) -> None:
    """Pushes of a trainer in this process; the middle one is left out, which the probe must notice."""
    from services.trainer.config import RankConfig
    from services.trainer.rank import TrainerRank
    from tests.gpu.trainer import make_samples

    rank = TrainerRank(
        RankConfig(
            model_path=str(model),
            dtype="bfloat16",
            max_tokens=10240,
            device=device,
            rollout_dtype="bfloat16",
            weight_backend=server.weight_backend,
            deterministic=False,
            share_prompts=False,
        )
    )
    engine = Engine(EngineAddress(server.name, server.url, server.token, server.incarnation), 120.0)
    await engine.init_transfer({} if server.weight_backend == "ipc" else {"root": str(work)})
    rng = np.random.default_rng(3)
    probe: list[Any] = [
        {
            "id": str(at),
            "prompt_ids": rng.integers(3, 40000, 32).astype(np.int32),
            "response_ids": rng.integers(3, 40000, 32).astype(np.int32),
        }
        for at in range(4)
    ]
    limits = PROBE_LIMITS["bfloat16"]

    async def server_values() -> np.ndarray:
        return np.concatenate([await engine.score(item["prompt_ids"], item["response_ids"]) for item in probe])

    def trainer_values() -> np.ndarray:
        return np.concatenate([result["logprobs"] for result in rank.log_probs(probe, exact=True)])

    previous: np.ndarray | None = None
    for at, (rate, pushed) in enumerate([(0.0, True), (1e-6, True), (1e-4, True), (1e-3, False), (0.0, True)]):
        if rate:
            samples = make_samples(32, rank.vocab_size, rng)
            rank.update(samples, _loss(samples), rate)
        began = time.perf_counter()
        publication = rank.publish(work)
        assert publication is not None
        published = time.perf_counter() - began
        seconds = await engine.push(publication.update_info, f"run/0/{at}") if pushed else 0.0
        held, expected = await server_values(), trainer_values()
        print(
            json.dumps(
                {
                    "push": at,
                    "learning_rate": rate,
                    "pushed": pushed,
                    "publish_s": round(published, 4),
                    "pause_to_resume_s": round(seconds, 4),
                    "s_per_gb": round(seconds / (publication.bytes / 1e9), 4),
                    "changed_fraction": round(publication.changed_fraction, 5),
                    "mean_difference": round(float(np.abs(held - expected).mean()), 5),
                    "largest_difference": round(float(np.abs(held - expected).max()), 5),
                    "moved": None if previous is None else round(float(np.abs(expected - previous).mean()), 5),
                    "verdict": probe_failure(held, expected, previous, limits) or "holds the weights",
                }
            ),
            flush=True,
        )
        previous = expected
    await engine.close()


def _loss(samples: list[Any]) -> Any:
    from nightshift.wire.experience import LossSpec

    return LossSpec(total_tokens=sum(sample.trained_tokens for sample in samples), total_sequences=len(samples))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--push", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    job = write_job(arguments.work, arguments.model, 1)
    server = VllmServer(
        load_job(job), store=arguments.work, log_path=arguments.work / "rollout.log", device=arguments.device, gpu=0
    )
    began = time.perf_counter()
    server.start()
    print(json.dumps({"server_start_s": round(time.perf_counter() - began, 1)}), flush=True)
    try:
        if arguments.push:
            asyncio.run(measure_push(server, arguments.model, arguments.work, arguments.device))
        if arguments.rounds:
            measure_generation(server, arguments.rounds)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
