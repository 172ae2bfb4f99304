"""Synchronous against asynchronous on the same split: generation on core 0, training on core 1, one thread each.

python -m tests.bench.real.same_split --out FILE.json [--rounds 3] [--most 1] [--judge] [key=value ...]

Arm ``sync`` generates a whole batch and then trains on it (max_staleness 0, no streaming); ``etaN`` has max_staleness N
and streams its updates, which is the default. The lengths are forced from a lognormal and equal
in all arms. With ``--judge`` the reward comes from a remote judge, which answers each call after ``--judge-seconds``.
The prediction of an asynchronous step takes the stage times of the synchronous runs, where each stage works alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tests.bench.real import jobs
from tests.bench.real.lengths import VARIABLE, Lengths
from tests.bench.real.record import Record, table

SYNC = "sync"
_STAGES = {
    "G": "generation",
    "S": "scoring",
    "R": "scoring_tail",
    "T": "update",
    "P": "publication",
    "V": "delivery",
    "W": "pause",
}


def measure(arguments: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of an arm."""
    lengths = Lengths(arguments.mean, arguments.sigma, arguments.longest)
    overrides = [
        *jobs.MEASURED,
        jobs.MIDDLEWARE,
        f"pipeline.max_staleness={bound_of(arm)}",
        f"pipeline.streaming={str(arm != SYNC).lower()}",
        f"rollout.max_response_length={arguments.longest}",
        "resources.rollout_cores=[0]",
        "resources.trainer_cores=[1]",
        "trainer.threads=1",
        "trainer.total_steps=1000",
    ]
    work = arguments.out.resolve().with_suffix("") / arm
    environment = {VARIABLE: lengths.to_text()}
    if not arguments.judge:
        overrides += [jobs.SPREAD_REWARD, *arguments.override]
        folder = jobs.run(work, overrides, steps=arguments.steps, timeout_s=arguments.timeout, environment=environment)
    else:
        with jobs.judge(arguments.judge_seconds) as address:
            overrides += [f"rewards=[{{type: grpc, url: '{address}', name: judge}}]", *arguments.override]
            folder = jobs.run(
                work, overrides, steps=arguments.steps, timeout_s=arguments.timeout, environment=environment
            )
    return jobs.figures(folder, arguments.warm) | {"lengths": lengths.to_text(), "overrides": arguments.override}


def bound_of(arm: str) -> int:
    """The staleness bound of an arm."""
    return 0 if arm == SYNC else int(arm.removeprefix("eta"))


def predicted(runs: list[dict[str, Any]], bound: int) -> float | None:
    """Seconds of a step that the reports on synchronous runs predict: each stage works alone there."""
    values = [run["report"]["predicted"]["by_staleness"][str(bound)] for run in runs]
    return statistics.median(values) if values else None


def show(record: Record, arms: list[str]) -> str:
    """The tables."""
    alone = record.of(SYNC)
    rows = []
    for arm in arms:
        runs = record.of(arm)
        if not runs:
            continue
        measured = record.median(arm, "seconds_per_step") or 0.0
        expected = predicted(alone, bound_of(arm))
        ratios = record.ratios(SYNC, arm, "seconds_per_step")
        idle = {
            role: statistics.median(r["bubble"] for run in runs for r in run["report"]["roles"] if r["role"] == role)
            for role in ("rollout", "trainer")
        }
        rows.append(
            (
                arm,
                [run["seconds_per_step"] for run in runs],
                measured,
                statistics.median(ratios) if ratios else None,
                expected,
                f"{100 * (expected / measured - 1):+.0f} %" if expected else None,
                f"{idle['rollout']:.0%}, {idle['trainer']:.0%}",
                [f"{run['load'][0]:.0f}" for run in runs],
            )
        )
    head = ("arm", "s a step, each run", "median", "sync / this", "predicted from sync", "off")
    text = table((*head, "idle: rollout, trainer", "load"), rows)
    if alone:
        stages = {
            symbol: statistics.median(run["report"]["stages"][name] or 0.0 for run in alone)
            for symbol, name in _STAGES.items()
        }
        stages["u"] = statistics.median(run["report"]["slots"]["occupancy"] for run in alone)
        text += "\n\nStages alone: " + ", ".join(f"{symbol} {value:.2f}" for symbol, value in stages.items())
    return text


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="further values of the job, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=[SYNC, "eta1", "eta2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=330.0)
    parser.add_argument("--mean", type=float, default=32.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--judge-seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    record = Record(arguments.out)
    record.go(arguments.arms, arguments.rounds, arguments.most, lambda arm, _: measure(arguments, arm))
    print(show(record, arguments.arms))


if __name__ == "__main__":
    main()
