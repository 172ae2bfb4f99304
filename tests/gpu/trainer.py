"""Speed of a training rank alone: MFU, memory, publication. One engine a process.

python -m tests.gpu.trainer MODEL [--tokens 20480] [--compile 0|1] [--updates 4] [--samples 256] [--packed 0|1]
    [--lengths equal|lognormal]

MFU is (6N + 6 L S d) tokens/s over 989 TFLOP/s: N parameters, L layers, S tokens of a sequence, d hidden units.
Tokens are those of the sequences, without padding. Calls with the same lengths draw the same samples, packed or not.
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


#: New tokens of a sample under "lognormal": mean before the cut at RESPONSE_TOKENS, and spread of the logarithm.
MEAN_TOKENS, SPREAD = 256, 0.7


def make_samples(count: int, vocabulary: int, rng: np.random.Generator, lengths: str = "equal") -> list[Sample]:
    """Samples of RESPONSE_TOKENS new tokens or, under "lognormal", at most as many, eight to a prompt."""
    sizes = np.full(count, RESPONSE_TOKENS)
    if lengths == "lognormal":
        drawn = rng.lognormal(np.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD, count)
        sizes = drawn.astype(int).clip(1, RESPONSE_TOKENS)
    samples = []
    for index, size in enumerate(sizes.tolist()):
        samples.append(
            Sample(
                f"g{index // 8}.{index % 8}",
                f"g{index // 8}",
                "0" * 31 + "1",
                rng.integers(3, 40000, PROMPT_TOKENS).astype(np.int32),
                rng.integers(3, vocabulary, size).astype(np.int32),
                np.full(size, -11.9, np.float32),
                np.ones(size, np.uint8),
                [VersionSpan("run/0/0", 0, size)],
                "length",
                reward=0.0,
                advantages=np.full(size, rng.normal(), np.float32),
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
    parser.add_argument("--packed", type=int, default=0)
    parser.add_argument("--lengths", choices=["equal", "lognormal"], default="equal")
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
            padding_free=bool(arguments.packed),
            threads=4,
        )
    )
    ready = time.perf_counter() - began
    rng = np.random.default_rng(0)
    seconds, steps, publications, tokens, flops, sums = [], [], [], [], [], None
    for _ in range(arguments.updates + 1):
        samples = make_samples(arguments.samples, rank.vocab_size, rng, arguments.lengths)
        spec = LossSpec(total_tokens=sum(s.trained_tokens for s in samples), total_sequences=len(samples))
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
        lengths = [PROMPT_TOKENS + len(sample.response_ids) for sample in samples]
        config = rank.policy.model.config
        tokens.append(sum(lengths))
        flops.append(sum(flops_per_token(config, rank.parameters, length) * length for length in lengths))
    rates = [[amount / s for amount, s in zip(what[1:], seconds[1:], strict=True)] for what in (tokens, flops)]
    print(
        json.dumps(
            {
                "arguments": {key: str(value) for key, value in vars(arguments).items()},
                "parameters": rank.parameters,
                "ready_s": round(ready, 1),
                "first_update_s": round(seconds[0], 2),
                "update_s": round(statistics.median(seconds[1:]), 3),
                "spread_s": [round(min(seconds[1:]), 3), round(max(seconds[1:]), 3)],
                "optimizer_s": round(statistics.median(steps[1:]), 3),
                "publish_s": round(statistics.median(publications[1:]), 4),
                "tokens_per_update": round(statistics.mean(tokens[1:])),
                "padding": round(sums.positions / (tokens[-1] - arguments.samples) - 1, 4) if sums else None,
                "tokens_per_second": round(statistics.median(rates[0])),
                "mfu": round(statistics.median(rates[1]) / PEAK, 4),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "entropy": round(sums.entropy / sums.tokens, 3) if sums else None,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
