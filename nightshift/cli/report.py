"""The end of a run: what was gained, and what it took."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from nightshift.cli.view import RunView

_WINDOW = 5
_OVERLAP = "overlap_share"


def report(view: RunView, run_dir: Path) -> dict[str, Any]:
    """The figures of a finished run.

    Returns:
        held_out {before, after, steps}, reward {first, last, window}, overlap_share, steps, checkpoint, memory; what is
        unknown is None.
    """
    scores = view.held_out()
    rewards = view.rewards()
    window = min(_WINDOW, len(rewards))
    return {
        "run_dir": str(run_dir),
        "steps": view.step,
        "held_out": {"before": scores[0][1], "after": scores[-1][1], "step": scores[-1][0]}
        if len(scores) > 1
        else None,
        "reward": {"first": fmean(rewards[:window]), "last": fmean(rewards[-window:]), "window": window}
        if rewards
        else None,
        "overlap_share": _overlap(view),
        "seconds_per_step": view.seconds_per_step,
        "checkpoint": _checkpoint(view, run_dir),
        "memory": view.memory or None,
        "warnings": len(view.warnings),
    }


def report_lines(figures: dict[str, Any]) -> list[str]:
    """The report as lines of a table."""
    lines = []
    if held_out := figures["held_out"]:
        reward = figures["reward"]
        rows = [
            ("", "before", "after", "change"),
            _row("held-out greedy accuracy", held_out["before"], held_out["after"]),
        ]
        if reward:
            rows.append(_row(f"mean reward, {reward['window']} steps", reward["first"], reward["last"]))
        lines += _table(rows)
    elif reward := figures["reward"]:
        rows = [
            ("", "first", "last", "change"),
            _row(f"mean reward, {reward['window']} steps", reward["first"], reward["last"]),
        ]
        lines += _table(rows)
    if figures["overlap_share"] is not None:
        lines.append(f"generation and training at once: {figures['overlap_share']:.0%} of the time")
    if memory := figures["memory"]:
        parts = ", ".join(f"{role} {size}" for role, size in memory["by_role"].items() if size)
        lines.append(f"peak memory of all processes: {memory['peak_mib']} MiB ({parts})")
    if figures["warnings"]:
        lines.append(f"warnings: {figures['warnings']} (in events.jsonl)")
    if figures["checkpoint"]:
        lines.append(f"checkpoint: {figures['checkpoint']}")
    lines.append(f"run: {figures['run_dir']}")
    return lines


def _row(name: str, before: float, after: float) -> tuple[str, str, str, str]:
    return (name, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _overlap(view: RunView) -> float | None:
    for place in (view.summary.get("metrics"), view.summary):
        if isinstance(place, dict) and isinstance(place.get(_OVERLAP), int | float):
            return float(place[_OVERLAP])
    return None


def _checkpoint(view: RunView, run_dir: Path) -> str | None:
    """The newest HF folder, else what the last checkpoint event named."""
    from nightshift.cli.runs import checkpoints

    found = checkpoints(run_dir, "actor")
    return str(found[-1]) if found else view.checkpoint or None
