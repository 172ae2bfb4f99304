"""``nightshift rollouts``: the samples of a run, from its parquet files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nightshift.cli.output import EXIT_DONE, print_json, waiting
from nightshift.cli.runs import find_run
from nightshift.wire.errors import BadInputError

#: Shown columns, in order: heading -> (names that the column may have, width).
_COLUMNS: dict[str, tuple[tuple[str, ...], int]] = {
    "step": (("step",), 5),
    "sample": (("sample_id",), 22),
    "row": (("row_id",), 10),
    "reward": (("reward",), 8),
    "tokens": (("response_tokens", "tokens"), 6),
    "finish": (("finish_reason",), 8),
    "versions": (("versions", "policy_versions"), 14),
    "trace": (("trace_id",), 12),
    "response": (("response_text", "response"), 60),
}


def read_rollouts(folder: Path, step: int | None = None, limit: int = 0) -> list[dict[str, Any]]:
    """Stored samples, the newest steps first, with whatever columns are there.

    Args:
        step: only the samples of this step.
        limit: most rows; 0: all.

    Raises:
        BadInputError: a file cannot be read; the message names it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.parquet"), reverse=True):
        try:
            table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(f"cannot read {str(path)!r}: {str(error).splitlines()[0]}") from error
        if step is not None and "step" in table.column_names:
            table = table.filter(pa.compute.equal(table["step"], step))
        rows += table.to_pylist()
        if limit and len(rows) >= limit:
            return rows[:limit]
    return rows


def show_rollouts(run: str, runs_dir: str, *, step: int | None, limit: int, as_json: bool) -> int:
    """Prints stored samples.

    Raises:
        BadInputError: there is no such run, or it stored none (of that step).
    """
    folder = find_run(run, runs_dir)
    with waiting("reading the rollouts"):
        rows = read_rollouts(folder / "rollouts", step, limit)
    if not rows:
        what = f"of step {step}" if step is not None else "yet"
        raise BadInputError(f"the run {folder.name!r} has stored no rollouts {what}")
    print_rollouts(rows, as_json=as_json)
    return EXIT_DONE


def print_rollouts(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Prints samples."""
    if as_json:
        for row in rows:
            print_json(row)
    else:
        for line in table(rows):
            print(line)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The samples as lines of text; columns that are not stored are left out."""
    present = [
        (heading, names, width)
        for heading, (names, width) in _COLUMNS.items()
        if any(name in row for row in rows for name in names)
    ]
    lines = ["  ".join(f"{heading:<{width}}" for heading, _, width in present).rstrip()]
    for row in rows:
        cells = [_cell(next((row[name] for name in names if name in row), None), width) for _, names, width in present]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cell(value: Any, width: int) -> str:
    if value is None:
        text = "-"
    elif isinstance(value, float):
        text = f"{value:.4g}"
    elif isinstance(value, list):
        text = ",".join(_steps(value))
    else:
        text = " ".join(str(value).split())
    return f"{text[: width - 1]}…" if len(text) > width else f"{text:<{width}}"


def _steps(versions: Iterable[Any]) -> list[str]:
    """Policy versions without their run: ``<run>/<lineage>/<step>`` as ``<lineage>/<step>``."""
    return ["/".join(str(version).split("/")[-2:]) for version in versions]
