"""Learning-rate schedules, by optimiser step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of the update with index ``step``, counted from 0.

    A linear rise from 0 over ``warmup_steps``, then constant, or down to 0 at ``total_steps`` by a line or by half a
    cosine. The rate is a function of the step alone, so that a resumed run goes on where it was.

    Raises:
        ValueError: ``schedule`` is not a known name, or ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")
