"""Asynchronous on split cores against synchronous with all cores in each phase: the same job otherwise.

python -m tests.bench.real.whole_pool --out FILE.json --task long|demo [--rounds 3] [--most 1] [key=value ...]

``pool`` generates a whole batch with both cores and then trains on it with both; ``eta1`` and ``eta2`` generate on
core 0 and train on core 1. ``long`` forces lognormal lengths; ``demo`` is the demo's task with its own answers, for
the reward of both arms. A round is a seed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tests.bench.real import jobs
from tests.bench.real.lengths import VARIABLE, Lengths
from tests.bench.real.record import Record, table


def measure(arguments: argparse.Namespace, arm: str, number: int) -> dict[str, Any]:
    """One run of an arm."""
    pool = arm == "pool"
    lengths = Lengths(arguments.mean, arguments.sigma, arguments.longest)
    long = arguments.task == "long"
    overrides = [
        *jobs.MEASURED,
        f"trainer.seed={number}",
        "trainer.total_steps=1000",
        f"pipeline.max_staleness={0 if pool else arm.removeprefix('eta')}",
        f"pipeline.streaming={str(not pool).lower()}",
        f"resources.rollout_cores={'[0,1]' if pool else '[0]'}",
        f"resources.trainer_cores={'[0,1]' if pool else '[1]'}",
        f"trainer.threads={2 if pool else 1}",
        *([jobs.MIDDLEWARE, jobs.SPREAD_REWARD, f"rollout.max_response_length={arguments.longest}"] if long else []),
        *arguments.override,
    ]
    folder = jobs.run(
        arguments.out.resolve().with_suffix("") / arm,
        overrides,
        steps=arguments.steps,
        timeout_s=arguments.timeout,
        environment={VARIABLE: lengths.to_text()} if long else {},
    )
    return jobs.figures(folder, arguments.warm) | {
        "lengths": lengths.to_text() if long else None,
        "overrides": arguments.override,
    }


def show(record: Record, arms: list[str]) -> str:
    """The tables: rates, and rewards against the seconds since the first request."""
    rows = []
    for arm in arms:
        runs, ratios = record.of(arm), record.ratios("pool", arm, "seconds_per_step")
        if runs:
            stages = {
                name: statistics.median(run["mean_stage"][name] for run in runs)
                for name in ("generation", "update", "publication", "delivery")
            }
            rows.append(
                (
                    arm,
                    [run["seconds_per_step"] for run in runs],
                    record.median(arm, "seconds_per_step"),
                    statistics.median(ratios) if ratios else None,
                    *stages.values(),
                )
            )
    head = ("arm", "s a step, each run", "median", "pool / this", "generation", "update", "publication", "delivery")
    curves = [
        (
            run["arm"],
            run["round"],
            " ".join(f"{s:.0f}:{r:.2f}" for s, r in zip(run["seconds"], run["rewards"], strict=True)),
        )
        for run in record.runs
    ]
    return table(head, rows) + "\n\n" + table(("arm", "seed", "seconds:reward of each step"), curves)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="further values of the job, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=["long", "demo"], required=True)
    parser.add_argument("--arms", nargs="+", default=["pool", "eta1", "eta2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=330.0)
    parser.add_argument("--mean", type=float, default=32.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=128)
    arguments = parser.parse_args()
    record = Record(arguments.out)
    record.go(arguments.arms, arguments.rounds, arguments.most, lambda arm, number: measure(arguments, arm, number))
    print(show(record, arguments.arms))


if __name__ == "__main__":
    main()
