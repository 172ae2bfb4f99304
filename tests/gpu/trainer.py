"""Speed of a training rank alone: MFU, memory, publication. One engine a process.

python -m tests.gpu.trainer MODEL [--tokens 20480] [--compile 0|1] [--updates 4] [--samples 256]

MFU is (6N + 6 L S d) tokens/s over 989 TFLOP/s: N parameters, L layers, S tokens of a sequence, d hidden units.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from nightshift.wire.experience import LossSpec, Sample, VersionSpan
from services.trainer.config import RankConfig
from tests.gpu.jobs import MICRO_BATCH_TOKENS, PROMPT_TOKENS, RESPONSE_TOKENS

PEAK = 989e12  # FLOP/s of an H200 in dense bfloat16, by its data sheet


def flops_per_token(config: Any, parameters: int, length: int) -> float:
    """Operations of one token, forward and backward, with causal attention."""
    return 6.0 * parameters + 6.0 * config.num_hidden_layers * length * config.hidden_size


def make_samples(count: int, vocabulary: int, rng: np.random.Generator) -> list[Sample]:
    """Samples of equal length, eight to a prompt."""
    samples = []
    for index in range(count):
        samples.append(
            Sample(
                f"g{index // 8}.{index % 8}",
                f"g{index // 8}",
                "0" * 31 + "1",
                rng.integers(3, 40000, PROMPT_TOKENS).astype(np.int32),
                rng.integers(3, vocabulary, RESPONSE_TOKENS).astype(np.int32),
                np.full(RESPONSE_TOKENS, -11.9, np.float32),
                np.ones(RESPONSE_TOKENS, np.uint8),
                [VersionSpan("run/0/0", 0, RESPONSE_TOKENS)],
                "length",
                reward=0.0,
                advantages=np.full(RESPONSE_TOKENS, rng.normal(), np.float32),
            )
        )
    return samples


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=MICRO_BATCH_TOKENS)
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--zero", type=int, default=2)
    arguments = parser.parse_args()

    import torch

    from services.trainer.rank import TrainerRank

    began = time.perf_counter()
    rank = TrainerRank(
        RankConfig(
            model_path=str(arguments.model),
            dtype="bfloat16",
            zero_stage=arguments.zero,
            max_tokens=arguments.tokens,
            device="cuda",
            rollout_dtype="bfloat16",
            weight_backend="ipc",
            deterministic=False,
            compile=bool(arguments.compile),
            share_prompts=False,
            threads=4,
        )
    )
    ready = time.perf_counter() - began
    rng = np.random.default_rng(0)
    spec = LossSpec(total_tokens=arguments.samples * RESPONSE_TOKENS, total_sequences=arguments.samples)
    seconds, steps, publications, sums = [], [], [], None
    for _ in range(arguments.updates + 1):
        samples = make_samples(arguments.samples, rank.vocab_size, rng)
        torch.cuda.synchronize()
        start = time.perf_counter()
        sums = rank.accumulate(samples, spec, float(spec.total_tokens))
        middle = time.perf_counter()
        rank.apply(1.0, 1e-6)
        torch.cuda.synchronize()
        end = time.perf_counter()
        rank.publish(Path("unused"))
        seconds.append(end - start)
        steps.append(end - middle)
        publications.append(time.perf_counter() - end)
    tokens = arguments.samples * (PROMPT_TOKENS + RESPONSE_TOKENS)
    median = statistics.median(seconds[1:])
    config = rank.policy.model.config
    flops = flops_per_token(config, rank.parameters, PROMPT_TOKENS + RESPONSE_TOKENS) * tokens
    print(
        json.dumps(
            {
                "arguments": {key: str(value) for key, value in vars(arguments).items()},
                "parameters": rank.parameters,
                "ready_s": round(ready, 1),
                "first_update_s": round(seconds[0], 2),
                "update_s": round(median, 3),
                "spread_s": [round(min(seconds[1:]), 3), round(max(seconds[1:]), 3)],
                "optimizer_s": round(statistics.median(steps[1:]), 3),
                "publish_s": round(statistics.median(publications[1:]), 4),
                "tokens_per_second": round(tokens / median),
                "mfu": round(flops / median / PEAK, 4),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "entropy": round(sums.entropy / sums.tokens, 3) if sums else None,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
