"""Seconds of the advantage stage for 512 samples of 8,192 tokens on one core, as JSON.

Run from the repository's folder: ``python -m tests.bench.bench_advantages [--samples N] [--tokens T] [--repeats R]``.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported

import argparse
import json
import time

import numpy as np

from nightshift.algorithms import REGISTRY, compute_advantages
from nightshift.config.algorithm import AlgorithmConfig
from nightshift.wire.experience import Sample, VersionSpan


def make_batch(count: int, tokens: int) -> tuple[list[Sample], list[np.ndarray]]:
    """Samples in groups of 8, with reference log-probs, and a critic's values."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(count):
        logprobs = -rng.random(tokens, dtype=np.float32)
        samples.append(
            Sample(
                sample_id=f"g{index // 8}.{index % 8}",
                group_id=f"g{index // 8}",
                trace_id="0" * 32,
                prompt_ids=np.zeros(8, np.int32),
                response_ids=np.zeros(tokens, np.int32),
                logprobs=logprobs,
                loss_mask=np.ones(tokens, np.uint8),
                versions=[VersionSpan("run/0/0", 0, tokens)],
                finish_reason="stop",
                reward=float(rng.random()),
                ref_logprobs=logprobs - np.float32(0.1),
                teacher_logprobs=logprobs + np.float32(0.1),
            )
        )
    return samples, [rng.standard_normal(tokens, dtype=np.float32) for _ in range(count)]


def main() -> None:
    """Prints one JSON map: the fastest and the median repeat per estimator, wall and CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    samples, values = make_batch(arguments.samples, arguments.tokens)
    results: dict[str, dict[str, float]] = {}
    cases = [(name, AlgorithmConfig(estimator=name)) for name in REGISTRY]
    penalty = AlgorithmConfig(estimator="reinforce_plus_plus", kl_in="reward", kl_coef=0.1, kl_estimator="k3")
    for name, config in [*cases, ("reinforce_plus_plus with KL in the reward", penalty)]:
        estimator = REGISTRY[config.estimator]
        given = {
            "values": values if estimator.needs_values else None,
            "target_logprobs": [s.ref_logprobs for s in samples] if estimator.needs_target else None,
        }
        wall, cpu = [], []
        for _ in range(arguments.repeats):
            at, cpu_at = time.perf_counter(), time.process_time()
            compute_advantages(samples, config, **given)  # type: ignore[arg-type]
            wall.append(time.perf_counter() - at)
            cpu.append(time.process_time() - cpu_at)
        results[name] = {
            "wall_seconds_min": round(min(wall), 4),
            "wall_seconds_median": round(float(np.median(wall)), 4),
            "cpu_seconds_min": round(min(cpu), 4),
            "cpu_seconds_median": round(float(np.median(cpu)), 4),
        }
    print(json.dumps({"samples": arguments.samples, "tokens": arguments.tokens, "cores": 1, "estimators": results}))


if __name__ == "__main__":
    main()
