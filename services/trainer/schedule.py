"""Learning rate of each update, as a pure function of its number."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(update: int, peak: float, schedule: Schedule, warmup: int, total: int | None) -> float:
    """Learning rate that update number ``update`` uses.

    It rises linearly from 0 over ``warmup`` updates; afterwards it stays (constant), or falls to 0 at ``total`` along a
    line or a half cosine (Loshchilov and Hutter 2017, without restarts). Being a function of the number alone, it goes
    on at the same value after a resume.

    Args:
        update: number of the update, counted from 0.
        peak: the highest rate.
        schedule: shape after the warm-up.
        warmup: updates of the warm-up.
        total: updates of the run; None only with "constant".

    Raises:
        ValueError: a decaying schedule without ``total``, or an unknown one.
    """
    if update < warmup:
        return peak * update / warmup
    if schedule == "constant":
        return peak
    if total is None:
        raise ValueError(f"schedule {schedule!r} needs the number of updates of the run")
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return 0.5 * peak * (1.0 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")
