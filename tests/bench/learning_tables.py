"""Results of the learning runs as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def interval(values: list[float], z: float = 1.8331) -> tuple[float, float]:
    """Mean and half of the 90% interval (Student's t with 9 degrees of freedom, for ten seeds)."""
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), z * spread


def learning_table(results: list[dict[str, Any]], expected: dict[str, tuple[str, float]]) -> list[str]:
    """Rows of Markdown: accuracy before and after, and whether what was expected came true."""
    lines = ["| method | before | after (mean, sd) | lowest seed | samples | expected | met |", "|" + " --- |" * 7]
    for name, (rule, bound) in expected.items():
        runs = [r for r in results if r["method"] == name]
        if not runs:
            continue
        first, last = [r["curve"][0] for r in runs], [r["curve"][-1] for r in runs]
        met = np.mean(last) >= bound if rule == ">=" else np.mean(last) - np.mean(first) <= bound
        deviation = np.std(last, ddof=1) if len(last) > 1 else math.nan
        lines.append(
            f"| {name} | {np.mean(first):.3f} | {np.mean(last):.3f}, {deviation:.3f} | {min(last):.3f} | "
            f"{int(np.mean([r['samples'] for r in runs]))} | {rule} {bound:g} | {'yes' if met else 'no'} |"
        )
    return lines


def staleness_table(results: list[dict[str, Any]], etas: Sequence[int], equivalence: float) -> list[str]:
    """Rows of Markdown: accuracy after the same number of samples by method and eta; and the equivalence test."""
    by_name: dict[str, dict[int, float]] = {}
    for result in results:
        if "@" in result["method"]:
            by_name.setdefault(result["method"], {})[result["seed"]] = result["curve"][-1]
    lines = ["| method | " + " | ".join(f"eta {eta}" for eta in etas) + " |", "|" + " --- |" * (len(etas) + 1)]
    for name in dict.fromkeys(name.partition("@")[0] for name in by_name):
        cells = []
        for eta in etas:
            values = list(by_name.get(f"{name}@{eta}", {}).values())
            deviation = np.std(values, ddof=1) if len(values) > 1 else math.nan
            cells.append(f"{np.mean(values):.3f}, {deviation:.3f}" if values else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    fresh, stale = by_name.get("decoupled@0", {}), by_name.get("decoupled@4", {})
    if fresh and stale:
        differences = [stale[seed] - fresh[seed] for seed in sorted(set(fresh) & set(stale))]
        mean, half = interval(differences)
        equal = abs(mean) + half <= equivalence
        lines.append("")
        lines.append(
            f"decoupled, eta 4 less eta 0: {mean:+.3f}, 90% interval {mean - half:+.3f} to {mean + half:+.3f}; "
            f"equivalent within {equivalence:g}: {'yes' if equal else 'no'}"
        )
    return lines
