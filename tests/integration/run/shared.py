"""What is known of the runs of conftest.py."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.real import write_chaos_job

#: Of the deterministic run: enough to kill each kind of process within it.
STEPS = 18


def deterministic_job(folder: Path, model: Path) -> Path:
    """A deterministic job, at a pace that a file may set."""
    pipeline = {"max_staleness": 0, "deterministic": True}
    return write_chaos_job(folder, model, steps=STEPS, save_freq=2, pipeline=pipeline)
