"""Synchronous against asynchronous on the same split: generation on core 0, training on core 1, one thread each.

python -m tests.bench.real.same_split --out FILE.json [--rounds 3] [--most 1] [--judge] [key=value ...]

Arms differ in ``pipeline.max_staleness`` alone: eta0, eta1, eta2. The lengths are forced from a lognormal and equal
in all arms. With ``--judge`` the reward comes from a remote judge, which answers each call after ``--judge-seconds``.
The prediction of an asynchronous step takes the stage times of the synchronous runs, where each stage works alone.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from nightshift.analysis import speedup
from nightshift.analysis.speedup import StageTimes
from tests.bench.real import jobs
from tests.bench.real.lengths import VARIABLE, Lengths
from tests.bench.real.record import Record, table

_STAGES = ("generation", "scoring_tail", "scoring", "update", "publication", "delivery", "pause")


def measure(arguments: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of an arm."""
    lengths = Lengths(arguments.mean, arguments.sigma, arguments.longest)
    overrides = [
        *jobs.MEASURED,
        jobs.MIDDLEWARE,
        f"pipeline.max_staleness={arm.removeprefix('eta')}",
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


def stage_times(runs: list[dict[str, Any]]) -> StageTimes:
    """Stage times of synchronous runs, medians over them: each stage works alone there."""

    def of(name: str) -> float:
        return statistics.median(run["report"]["stages"][name] or 0.0 for run in runs)

    values = {name: of(name) for name in _STAGES}
    advantages = of("advantages")
    return StageTimes(
        generation=values["generation"],
        scoring=values["scoring"],
        training=values["update"] + advantages,
        publication=values["publication"],
        pause=values["pause"],
        delivery=max(values["pause"], values["delivery"]),
        scoring_tail=min(values["scoring"], values["scoring_tail"]),
        occupancy=statistics.median(run["report"]["slots"]["occupancy"] for run in runs),
    )


def show(record: Record, arms: list[str]) -> str:
    """The tables."""
    alone = stage_times(record.of(arms[0])) if record.of(arms[0]) else None
    rows = []
    for arm in arms:
        runs = record.of(arm)
        if not runs:
            continue
        bound = int(arm.removeprefix("eta"))
        measured = record.median(arm, "seconds_per_step")
        predicted = speedup.step_seconds(alone, bound) if alone else None
        ratios = record.ratios(arms[0], arm, "seconds_per_step")
        busy = {
            role: statistics.median(r["bubble"] for run in runs for r in run["report"]["roles"] if r["role"] == role)
            for role in ("rollout", "trainer")
        }
        rows.append(
            (
                arm.removeprefix("eta"),
                [run["seconds_per_step"] for run in runs],
                measured,
                statistics.median(ratios) if ratios else None,
                predicted,
                f"{100 * (predicted / measured - 1):+.0f} %" if predicted and measured else None,
                speedup.limit(alone, bound) if alone else None,
                f"{busy['rollout']:.0%}, {busy['trainer']:.0%}",
            )
        )
    head = (
        "max_staleness",
        "s a step, each run",
        "median",
        "sync / this",
        "predicted",
        "off",
        "pace",
        "idle: rollout, trainer",
    )
    text = table(head, rows)
    if alone is not None:
        text += (
            f"\n\nStages alone (s): G {alone.generation:.2f}, u {alone.occupancy:.2f}, S {alone.scoring:.2f}, "
            f"R {alone.scoring_tail or 0:.2f}, T {alone.training:.2f}, P {alone.publication:.2f}, "
            f"V {alone.delivered:.2f}, W {alone.pause:.2f}"
        )
    return text


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="further values of the job, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=["eta0", "eta1", "eta2"])
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
