"""``nightshift report``: measured and predicted step time, idle time, staleness, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from nightshift.analysis.recording import load
from nightshift.analysis.report import Predicted, Report, report
from nightshift.cli.output import EXIT_DONE, print_json, waiting
from nightshift.cli.runs import find_run

_STAGES = {
    "generation": "first request to last answer",
    "scoring": "the slowest scorer",
    "scoring_tail": "from the last answer to the last score",
    "update": "the trainer's update",
    "training_tail": "what of it comes after the last score",
    "publication": "the trainer hands its weights out",
    "delivery": "until the servers generate with them",
    "pause": "servers stand still meanwhile",
    "wait": "the trainer waited for a batch",
}


def show_report(run: str, runs_dir: str, *, as_json: bool) -> int:
    """Prints the report on a run.

    Raises:
        BadInputError: there is no such run, or a file of it cannot be read.
    """
    folder = find_run(run, runs_dir)
    with waiting("drawing up the report"):
        found = report(load(folder))
    return print_report(found, as_json=as_json)


def print_report(found: Report, *, as_json: bool) -> int:
    """Prints a report."""
    if as_json:
        print_json(asdict(found))
    else:
        print("\n".join(lines_of(found)))
    return EXIT_DONE


def lines_of(found: Report) -> list[str]:
    """The report as lines of text; what is missing is a dash and named at the end."""
    mode = {"sync": "synchronous", "async": f"asynchronous, max_staleness {_bound(found.max_staleness)}"}
    rows: list[tuple[str, ...]]
    lines = [f"{found.run_id}  ({mode[found.mode] if found.mode else 'mode unknown'})", *_steps(found), ""]
    if any(found.stages.get(name) is not None for name in _STAGES):
        rows = [(name.replace("_", " "), _s(found.stages.get(name)), what) for name, what in _STAGES.items()]
        lines += [*_table([("stage", "median", ""), *rows]), ""]
    if found.predicted is not None:
        needed = found.predicted.staleness_needed
        lines += [
            *_table(_prediction(found, found.predicted)),
            f"max_staleness above {needed} makes no step shorter",
            "",
        ]
    if found.roles:
        heads = ("role", "busy", "bubble", "predicted")
        rows = [(role.role, _p(role.busy), _p(role.bubble), _p(role.predicted_bubble)) for role in found.roles]
        lines += [*_table([heads, *rows]), ""]
    if (ages := found.staleness) is not None:
        rows = [
            (str(age), *(str(counts.get(age, 0)) for counts in (ages.groups, ages.samples, ages.tokens)))
            for age in sorted({*ages.groups, *ages.samples, *ages.tokens})
        ]
        lines += _table([("staleness", "groups", "samples", "tokens"), *rows])
        lines += [f"without a version: {ages.unknown} samples"] if ages.unknown else []
        lines.append("")
    if (slots := found.slots) is not None:
        lines += [
            f"slots: {slots.occupancy:.0%} full while a batch is generated (at most {slots.peak} sequences at once); "
            f"the longest takes {slots.longest_over_mean:.1f} times the mean",
            "",
        ]
    lines += [f"- {line}" for line in found.advice]
    lines += [f"missing: {line}" for line in found.missing]
    return lines[:-1] if lines[-1] == "" else lines


def _steps(found: Report) -> list[str]:
    steps = found.steps
    left = ", ".join(f"{count} {reason}" for reason, count in steps.left_out.items())
    text = f"steps: {steps.made} made, {len(steps.used)} measured" + (f" (left out: {left})" if left else "")
    if steps.median is None:
        return [text]
    return [text, f"step time: median {_s(steps.median)}, mean {_s(steps.mean)}"]


def _prediction(found: Report, predicted: Predicted) -> list[tuple[str, ...]]:
    measured = found.steps.mean
    rows: list[tuple[str, ...]] = [("step time", "predicted", "measured", "")]
    if predicted.own is not None:
        off = f"model {round(100 * predicted.error):+d}%" if predicted.error is not None else ""
        name = "synchronous" if found.mode == "sync" else f"max_staleness {_bound(found.max_staleness)}"
        rows.append((name, _s(predicted.own), _s(measured), f"{off}; pace: {predicted.limit}".lstrip("; ")))
    if found.mode != "sync":
        # Its stages were measured beside one another, and would be shorter alone.
        rows.append(("synchronous", f"≤ {_s(predicted.sync)}", "-", _ratio(predicted, predicted.sync)))
    own = None if found.mode is None else _bound(found.max_staleness)
    shown: set[float] = set()
    for bound, seconds in predicted.by_staleness.items():
        if bound not in ("0", own) and (bound == "none" or seconds not in shown):
            shown.add(seconds)
            rows.append((f"max_staleness {bound}", _s(seconds), "-", _ratio(predicted, seconds)))
    return rows


def _ratio(predicted: Predicted, seconds: float) -> str:
    return f"{predicted.own / seconds:.2f} x the speed" if predicted.own and seconds else ""


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, the heading first: names to the left, figures to the right, a column without heading as text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = [number == 0 or not heading for number, heading in enumerate(rows[0])]
    return [
        "  ".join(
            f"{cell:<{width}}" if text else f"{cell:>{width}}"
            for cell, width, text in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]


def _bound(bound: int | None) -> str:
    return "none" if bound is None else str(bound)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _p(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
