"""What a panel is, before it becomes Grafana's JSON: the form in which dashboards.py is written and tests read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str = "{{run_id}}"
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        unit: Grafana's name of the unit ("s", "bytes", "percentunit", "short").
        kind: curves over time, or one number.
        note: what to read off it, in one sentence.
        most: upper end of the axis, where the quantity has one.
    """

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["curves", "number"] = "curves"
    note: str = ""
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...] = field(default_factory=tuple)

    @property
    def panels(self) -> list[Panel]:
        """All panels in order."""
        return [panel for row in self.rows for panel in row.panels]


#: What each query is narrowed to.
RUN = 'run_id=~"$run_id"'
#: The same for processes that may serve several runs, as the chart labels its servers and Ray nodes.
SHARED = 'run_id=~"$run_id|shared"'


def curve(
    title: str, *queries: tuple[str, str], unit: str = "short", note: str = "", most: float | None = None
) -> Panel:
    """A panel of curves; each query is (expression, legend), with RUN in place of ``%``."""
    return Panel(title, tuple(Query(_narrow(expr), legend) for expr, legend in queries), unit, "curves", note, most)


def number(title: str, expr: str, *, unit: str = "short", note: str = "") -> Panel:
    """A panel of one number."""
    return Panel(title, (Query(_narrow(expr), ""),), unit, "number", note)


def _narrow(expr: str) -> str:
    others = any(name in expr for name in ("vllm:", "ray_", "up{"))
    return expr.replace("%", SHARED if others else RUN)


def stage_times(title: str, *stages: str, note: str = "") -> Panel:
    """Median and 95th percentile of stages, with traces as exemplars."""
    names = "|".join(stages)
    queries = []
    for share, mark in ((0.5, "median"), (0.95, "95 %")):
        expr = (
            f"histogram_quantile({share}, sum by (run_id, stage, le) "
            f'(rate(nightshift_stage_seconds_bucket{{{RUN}, stage=~"{names}"}}[$__rate_interval])))'
        )
        queries.append(Query(expr, f"{{{{stage}}}} {mark}", exemplars=True))
    return Panel(title, tuple(queries), "s", "curves", note)
