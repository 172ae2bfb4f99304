"""Draws the dashboards with matplotlib, for the documentation: the same queries on the same data, without Grafana."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from deploy.grafana.panels import Board, Panel

#: (expression, start, end) -> the series of Prometheus' query_range.
Ask = Callable[[str, float, float], list[dict[str, Any]]]
_COLUMNS, _WIDTH, _HEIGHT = 3, 4.6, 2.3
_STYLE = {
    "svg.hashsalt": "nightshift",
    "svg.fonttype": "none",
    "font.size": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
}


def draw_boards(boards: Sequence[Board], ask: Ask, folder: Path, start: float, end: float) -> None:
    """Writes one image per dashboard, ``<uid>.svg``.

    Args:
        start, end: unix seconds of the time shown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for board in boards:
        with mpl.rc_context(_STYLE):
            figure = _board(board, ask, start, end)
            figure.savefig(folder / f"{board.uid}.svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)


def _board(board: Board, ask: Ask, start: float, end: float) -> Any:
    rows = sum(math.ceil(len(row.panels) / _COLUMNS) for row in board.rows)
    figure, grid = plt.subplots(
        rows, _COLUMNS, figsize=(_COLUMNS * _WIDTH, rows * _HEIGHT), squeeze=False, layout="constrained"
    )
    figure.suptitle(board.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    at = 0
    for row in board.rows:
        for number, panel in enumerate(row.panels):
            axes = grid[at + number // _COLUMNS][number % _COLUMNS]
            _panel(axes, panel, ask, start, end)
        used = math.ceil(len(row.panels) / _COLUMNS)
        for number in range(len(row.panels), used * _COLUMNS):
            grid[at + number // _COLUMNS][number % _COLUMNS].axis("off")
        at += used
    return figure


def _panel(axes: Any, panel: Panel, ask: Ask, start: float, end: float) -> None:
    axes.set_title(panel.title, fontsize=8.5)
    for query in panel.queries:
        for series in ask(query.expr, start, end):
            times = [float(time) - start for time, _ in series["values"]]
            values = [float(value) / (2**20 if panel.unit == "bytes" else 1) for _, value in series["values"]]
            axes.plot(times, values, linewidth=1.2, label=_legend(query.legend, series["metric"]))
    if panel.most is not None:
        axes.set_ylim(0, panel.most * 1.03)
    unit = {"s": "s", "bytes": "MiB", "percentunit": "share"}.get(panel.unit, "")
    axes.set_ylabel(unit)
    axes.set_xlabel("s")
    handles, labels = axes.get_legend_handles_labels()
    if labels and any(labels):
        axes.legend(handles[:8], labels[:8], fontsize=6, frameon=False, loc="best")


def _legend(form: str, labels: dict[str, str]) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form).strip()
    return re.sub(r"-\d{8}-\d{6}-", "-", re.sub(r"^run-\d+$", "run", text))
