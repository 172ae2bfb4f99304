"""In-flight weight updates against draining: generation throughput, and how long no token leaves the server.

python -m tests.bench.real.in_flight --out FILE.json [--rounds 3] [--most 1] [key=value ...]

The arms differ in what becomes of running responses at a push: they go on with the cache that they have, go on once it
is computed anew (``recompute``), or end first. A pause is the longest time without a token of any sample around a
push: from the last token before it to the first one after it, as they leave the server.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nightshift.analysis.recording import load
from nightshift.analysis.spans import Interval
from tests.bench.real import jobs
from tests.bench.real.lengths import VARIABLE, Lengths
from tests.bench.real.middleware import FRAMES_VARIABLE
from tests.bench.real.record import Record, table

#: Settings of each arm.
ARMS = {
    "in_flight": ["pipeline.weight_update=in_flight", "pipeline.keep_cache=true"],
    "recompute": ["pipeline.weight_update=in_flight", "pipeline.keep_cache=false"],
    "drain": ["pipeline.weight_update=drain"],
}


def pauses(tokens: Sequence[float], pushes: Sequence[Interval]) -> list[float]:
    """For each push with tokens before and after it, the longest gap between two tokens that touches it, in seconds."""
    found = []
    for start, end in pushes:
        gaps = [b - a for a, b in itertools.pairwise(tokens) if a < end and b > start]
        if gaps:
            found.append(max(gaps))
    return found


def measure(arguments: argparse.Namespace, arm: str) -> dict[str, Any]:
    """One run of an arm."""
    lengths = Lengths(arguments.mean, arguments.sigma, arguments.longest)
    work = arguments.out.resolve().with_suffix("") / arm
    work.mkdir(parents=True, exist_ok=True)
    (work / "tokens.txt").unlink(missing_ok=True)
    overrides = [
        *jobs.MEASURED,
        jobs.MIDDLEWARE,
        jobs.SPREAD_REWARD,
        *ARMS[arm],
        f"pipeline.max_staleness={arguments.staleness}",
        f"rollout.max_response_length={arguments.longest}",
        "trainer.total_steps=1000",
        *arguments.override,
    ]
    folder = jobs.run(
        work,
        overrides,
        steps=arguments.steps,
        timeout_s=arguments.timeout,
        environment={VARIABLE: lengths.to_text(), FRAMES_VARIABLE: str(work / "tokens.txt")},
    )
    recording = load(folder)
    since = recording.steps[arguments.warm - 1].time
    tokens = sorted(float(line.split()[0]) for line in (work / "tokens.txt").read_text().splitlines())
    pushes = [span.interval for span in recording.named("push_weights") if span.start > since]
    found = jobs.figures(folder, arguments.warm)
    gaps = pauses(tokens, pushes)
    within = [time for time in tokens if since < time <= recording.steps[-1].time]
    return found | {
        "lengths": lengths.to_text(),
        "overrides": arguments.override,
        "pause": statistics.median(gaps),
        "pauses": [round(gap, 3) for gap in gaps],
        # Between two tokens without a push: what a pause is seen against.
        "usual_gap": statistics.median(b - a for a, b in itertools.pairwise(within) if b - a > 0.005),
    }


def show(record: Record) -> str:
    """The table."""
    rows = []
    for arm in ARMS:
        ratios = record.ratios(arm, "drain", "tokens_per_second")
        runs = record.of(arm)
        rows.append(
            (
                arm,
                [run["tokens_per_second"] for run in runs],
                statistics.median(ratios) if ratios else None,
                record.median(arm, "seconds_per_step"),
                record.median(arm, "pause"),
                statistics.median(run["mean_stage"]["pause"] for run in runs) if runs else None,
                record.median(arm, "usual_gap"),
                [run["report"]["slots"]["occupancy"] for run in runs],
                record.median(arm, "log_ratio"),
            )
        )
    head = (
        "running responses",
        "tokens/s, each run",
        "beside drain",
        "s a step",
        "s without a token",
        "s from pause to resume",
    )
    return table((*head, "s between tokens", "u", "mean |log ratio|"), rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("override", nargs="*", help="further values of the job, key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=330.0)
    parser.add_argument("--mean", type=float, default=32.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=128)
    arguments = parser.parse_args()
    record = Record(arguments.out)
    record.go(list(ARMS), arguments.rounds, arguments.most, lambda arm, _: measure(arguments, arm))
    print(show(record))


if __name__ == "__main__":
    main()
