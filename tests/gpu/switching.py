"""Asynchronous against synchronous in alternating stretches of one job on one GPU.

python -m tests.gpu.switching MODEL WORK [--bounds 1 0] [--pairs 5] [--steps 3] [--warm 3]

The staleness bound is changed while the job runs, as ``nightshift set`` does, so that both arms have the same
processes, caches and memory, and no start between them. The first step after a change belongs to neither arm. Prints
one JSON line a stretch, then the ratio of each pair and their median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from nightshift.wire.settings_file import ASKED, write_settings
from tests.gpu.jobs import run_steps, write_job

_KEY = "pipeline.max_staleness"
_SHOWN = ("timing/gen", "timing/update_actor", "timing/publish", "timing/sync", "staleness/mean", "bubble/trainer")


def stretches(events: list[dict[str, Any]], bound: int, warm: int) -> list[dict[str, Any]]:
    """The stretches of a job between changes of its bound, without the first step of each.

    Args:
        events: the run's, in order.
        bound: the job file's.
        warm: steps at the job's beginning that count for nothing.
    """
    changes = {event["step"]: event["new"] for event in events if event["kind"] == "setting" and event["key"] == _KEY}
    steps, at = [], 0
    for event in (event for event in events if event["kind"] == "step" and event["step"] > warm):
        at += event["step"] in changes
        bound = changes.get(event["step"], bound)
        steps.append((at, bound, event))
    found = []
    for (_, held), group in groupby(steps, key=lambda step: step[:2]):
        first, *rest = [event for *_, event in group]
        if not rest:
            continue
        span = rest[-1]["time"] - first["time"]
        samples = sum(step["metrics"]["samples"] for step in rest)
        found.append(
            {
                "bound": held,
                "steps": len(rest),
                "seconds_per_step": round(span / len(rest), 3),
                "samples_per_second": round(samples / span, 2),
                "oldest": max(step["metrics"]["staleness/max"] for step in rest),
                "median": {
                    name: round(statistics.median(step["metrics"].get(name, 0.0) for step in rest), 4)
                    for name in _SHOWN
                },
            }
        )
    return found


def ratios(found: list[dict[str, Any]], bounds: list[int]) -> list[float]:
    """Rate of each stretch of the first bound over that of the stretch after it."""
    return [
        round(one["samples_per_second"] / other["samples_per_second"], 3)
        for one, other in pairwise(found)
        if [one["bound"], other["bound"]] == bounds
    ]


class _Switch:
    """Asks for the other bound once so many steps were made under one."""

    def __init__(self, bounds: list[int], steps: int, warm: int) -> None:
        self._bounds, self._each, self._due, self._at = bounds, steps + 1, warm + steps + 1, 0

    def __call__(self, folder: Path, events: list[dict[str, Any]]) -> None:
        made = [event["step"] for event in events if event["kind"] == "step"]
        if not made or made[-1] < self._due:
            return
        self._at += 1
        write_settings(folder / ASKED, {_KEY: self._bounds[self._at % len(self._bounds)]})
        # The job may be a step further before it looks: then this stretch is a step longer.
        self._due = made[-1] + self._each


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--bounds", type=int, nargs=2, default=[1, 0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=560.0)
    arguments = parser.parse_args()
    # One step more for each change that a job takes a step later than it was asked.
    total = arguments.warm + 2 * arguments.pairs * (arguments.steps + 1) + 1
    job = write_job(
        arguments.work / "switching",
        arguments.model,
        total + 50,
        pipeline={"max_staleness": arguments.bounds[0]},
    )
    switch = _Switch(arguments.bounds, arguments.steps, arguments.warm)
    try:
        _, events, _ = run_steps(job, total, arguments.timeout, watch=switch)
    except RuntimeError as error:
        newest = max((job.parent / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
        lines = (newest / "events.jsonl").read_text().splitlines() if (newest / "events.jsonl").exists() else []
        events = [json.loads(line) for line in lines]
        print(json.dumps({"error": str(error)[-1500:]}), flush=True)
    found = stretches(events, arguments.bounds[0], arguments.warm)
    for stretch in found:
        print(json.dumps(stretch), flush=True)
    pairs = ratios(found, arguments.bounds)
    if pairs:
        print(json.dumps({"bounds": arguments.bounds, "ratios": pairs, "median": round(statistics.median(pairs), 3)}))


if __name__ == "__main__":
    main()
