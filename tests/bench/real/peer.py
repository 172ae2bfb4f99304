"""Nightshift beside TRL on the same two cores: same task, batch and lengths, in one run, without a reference.

python -m tests.bench.real.peer --peer-python PEER/bin/python --out FILE.json --task short|long [--rounds 3] [--most 1]

PEER is a virtual environment with trl 1.16.0 and its dependencies, outside the repository. ``short`` is the demo's
task with its own answers; ``long`` forces lognormal lengths (mean 64, at most 256 tokens) in all arms. An arm of TRL
is named by weights, ``+amp`` for bfloat16 products, and its attention; ``nightshift`` is the demo's job, and
``nightshift+bf16`` the same with a bfloat16 server.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.bench.real import jobs
from tests.bench.real.lengths import VARIABLE, Lengths
from tests.bench.real.record import Record, table

PROMPTS, SAMPLES, LEARNING_RATE = 8, 4, 1e-5
#: Tokens of the demo's answers, and of the forced ones.
SHORT, LONG = 8, 256
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "MALLOC_MMAP_THRESHOLD_": "17179869184",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def ours(arguments: argparse.Namespace, arm: str, number: int) -> dict[str, Any]:
    """One run of ``nightshift run``."""
    long = arguments.task == "long"
    lengths = Lengths(64.0, 1.0, LONG)
    overrides = [
        *jobs.MEASURED,
        f"trainer.seed={number}",
        f"trainer.learning_rate={LEARNING_RATE}",
        "trainer.total_steps=1000",
        *([jobs.MIDDLEWARE, jobs.SPREAD_REWARD, f"rollout.max_response_length={LONG}"] if long else []),
        *(["rollout.dtype=bfloat16"] if arm.endswith("+bf16") else []),
        *arguments.override,
    ]
    folder = jobs.run(
        arguments.out.resolve().with_suffix("") / arm,
        overrides,
        steps=arguments.steps,
        timeout_s=arguments.timeout,
        environment={VARIABLE: lengths.to_text()} if long else {},
    )
    return jobs.figures(folder, arguments.warm) | {"overrides": arguments.override}


def theirs(arguments: argparse.Namespace, arm: str, number: int) -> dict[str, Any]:
    """One run of TRL.

    Raises:
        RuntimeError: it made no steps; quotes the end of its output.
    """
    jobs.make_data()
    work = arguments.out.resolve().with_suffix("") / arm
    work.mkdir(parents=True, exist_ok=True)
    long = arguments.task == "long"
    name, attention = arm.removeprefix("trl-").rsplit("-", 1)
    rows = pq.read_table(jobs.DEMO.parent / "data/lastword/train.parquet").to_pylist()
    rows = [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
    (work / "rows.json").write_text(json.dumps(rows))
    settings = {
        "model": arguments.model,
        "work": str(work),
        "rows": str(work / "rows.json"),
        "threads": len(os.sched_getaffinity(0)),
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "micro_batches": arguments.micro_batches,
        "longest": LONG if long else SHORT,
        "lengths": Lengths(64.0, 1.0, LONG).to_text() if long else "",
        "steps": arguments.steps,
        "first": arguments.first,
        "learning_rate": LEARNING_RATE,
        "autocast": name.endswith("+amp"),
        "dtype": name.removesuffix("+amp"),
        "attention": attention,
        "continuous": False,
        "seed": number,
    }
    (work / "settings.json").write_text(json.dumps(settings))
    command = [arguments.peer_python, "-m", "tests.bench.real.trl_driver", str(work / "settings.json")]
    began = time.monotonic()
    log = work / "out.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=jobs.ROOT, env={**os.environ, **_ENVIRONMENT}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    steps = [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
    if len(steps) <= arguments.warm:
        raise RuntimeError(f"{len(steps)} steps in {time.monotonic() - began:.0f} s: {text[-3000:]}")
    span = steps[-1]["seconds"] - steps[arguments.warm - 1]["seconds"]
    counted = steps[arguments.warm :]
    samples = PROMPTS * SAMPLES * len(counted)
    tokens = PROMPTS * SAMPLES * sum(step["response_length"] for step in counted)
    return {
        "steps": len(counted),
        "seconds_per_step": span / len(counted),
        "samples_per_second": samples / span,
        "tokens_per_second": tokens / span,
        "tokens_per_sample": tokens / samples,
        "rewards": [step["reward"] for step in steps],
        "seconds": [step["seconds"] for step in steps],
        "response_length": [step["response_length"] for step in steps],
        "peak_mib": steps[-1]["peak_mib"],
        "settings": {key: settings[key] for key in ("threads", "micro_batches", "autocast", "dtype", "attention")},
    }


def show(record: Record) -> str:
    """The tables: rates, and rewards against the seconds since the first request."""
    arms = list(dict.fromkeys(run["arm"] for run in record.runs))
    best = max(
        (arm for arm in arms if arm.startswith("trl")),
        key=lambda arm: record.median(arm, "samples_per_second") or 0.0,
        default=None,
    )
    rows = []
    for arm in arms:
        ratios = record.ratios(arm, best, "samples_per_second") if best else []
        rows.append(
            (
                arm,
                [run["samples_per_second"] for run in record.of(arm)],
                record.median(arm, "samples_per_second"),
                record.median(arm, "seconds_per_step"),
                record.median(arm, "tokens_per_second"),
                statistics.median(ratios) if ratios else None,
            )
        )
    text = table(("arm", "samples/s, each run", "median", "s a step", "tokens/s", f"beside {best}"), rows)
    curves = [
        (
            run["arm"],
            run["round"],
            " ".join(
                f"{seconds:.0f}:{reward:.2f}" for seconds, reward in zip(run["seconds"], run["rewards"], strict=True)
            ),
        )
        for run in record.runs
    ]
    return text + "\n\n" + table(("arm", "round", "seconds:reward of each step"), curves)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="further values of our job, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=["short", "long"], required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--model", required=True, help="folder of the demo's model, for TRL")
    parser.add_argument("--arms", nargs="+", default=["trl-float32+amp-eager", "nightshift"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=330.0)
    parser.add_argument("--first", type=int, default=0, help="of TRL: number of the batch whose lengths come first")
    parser.add_argument("--micro-batches", type=int, default=1, help="of TRL")
    arguments = parser.parse_args()
    record = Record(arguments.out)

    def measure(arm: str, number: int) -> dict[str, Any]:
        return (theirs if arm.startswith("trl") else ours)(arguments, arm, number)

    record.go(arguments.arms, arguments.rounds, arguments.most, measure)
    print(show(record))


if __name__ == "__main__":
    main()
