"""Draws the dashboards with matplotlib, for the documentation: the same queries on the same data, without Grafana."""

from __future__ import annotations

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
_WIDTH, _HEIGHT, _CELLS = 14.0, 2.2, 12
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
    lines = [line for row in board.rows for line in _lines(row.panels)]
    figure = plt.figure(figsize=(_WIDTH, len(lines) * _HEIGHT), layout="constrained")
    grid = figure.add_gridspec(len(lines), _CELLS)
    figure.suptitle(board.title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    for number, panels in enumerate(lines):
        cells = _CELLS // max(3, len(panels))
        for at, panel in enumerate(panels):
            _panel(figure.add_subplot(grid[number, at * cells : (at + 1) * cells]), panel, ask, start, end)
    return figure


def _lines(panels: Sequence[Panel]) -> list[Sequence[Panel]]:
    """The panels of a row, at most four beside each other."""
    most = 4 if len(panels) == 4 else 3
    return [panels[at : at + most] for at in range(0, len(panels), most)]


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
        axes.legend(handles[:6], labels[:6], fontsize=6, frameon=False, loc="best")


def _legend(form: str, labels: dict[str, str]) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form).strip()
    return re.sub(r"-\d{8}-\d{6}-", "-", re.sub(r"^run-\d+$", "run", text))
