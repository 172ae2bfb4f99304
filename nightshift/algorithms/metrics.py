"""Means that leave out what is missing, instead of turning into NaN or counting it as 0."""

from __future__ import annotations

import math
from collections.abc import Iterable


def mean_of_valid(values: Iterable[float | None]) -> float:
    """Mean of the finite values; NaN where there is none."""
    valid = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(valid) / len(valid) if valid else math.nan
