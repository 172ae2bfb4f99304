"""Writes the dashboards as Grafana's JSON: ``python -m deploy.grafana.build``; ``--check``: are they up to date?

The files lie in the chart, which makes a ConfigMap of each; docker-compose.yml mounts the same ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphGradientMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh, VariableSort

from deploy.grafana.dashboards import BOARDS
from deploy.grafana.panels import Board, Panel, Query

FOLDER = Path(__file__).resolve().parents[1] / "helm/nightshift/files/dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
_TAG = "nightshift"
_HEIGHT, _WIDTH, _COLUMNS = 7, 24, 3


def encode(board: Board) -> str:
    """One dashboard as JSON with a stable order of keys."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([_TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("Nightshift")
            .type("dashboards")
            .tags([_TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run_id")
            .label("Run")
            .datasource(_SOURCE)
            .query("label_values(nightshift_job_state, run_id)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_DESC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title))
        columns = min(len(row.panels), 4 if row.panels[0].kind == "number" else _COLUMNS)
        for panel in row.panels:
            made = made.with_panel(_panel(panel, _WIDTH // columns))
    plain = _without_null(json.loads(json.dumps(made.build(), cls=JSONEncoder)))
    for number, panel in enumerate(plain["panels"], 1):
        panel["id"] = number
    return json.dumps(plain, indent=1, sort_keys=True) + "\n"


def _without_null(value: Any) -> Any:
    """The SDK writes null for what was not set, where Grafana expects the key to be absent."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _panel(panel: Panel, width: int) -> timeseries.Panel | stat.Panel:
    if panel.kind == "number":
        made: timeseries.Panel | stat.Panel = stat.Panel()
    else:
        legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made = (
            timeseries.Panel()
            .line_width(1)
            .fill_opacity(8)
            .gradient_mode(GraphGradientMode.NONE)
            .legend(legend.show_legend(True))
        )
    made = made.title(panel.title).unit(panel.unit).datasource(_SOURCE)
    if panel.most is not None:
        made = made.min(0).max(panel.most)
    if panel.note:
        made = made.description(panel.note)
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(query, chr(ord("A") + number), instant=panel.kind == "number"))
    return made.height(4 if panel.kind == "number" else _HEIGHT).span(width)


def _target(query: Query, ref: str, *, instant: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref).datasource(_SOURCE)
    if query.exemplars:
        made = made.exemplar(True)
    return made.instant() if instant else made.range()


def main() -> int:
    """Runs the command line; 0: written, or up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {FOLDER / f"{board.uid}.json": encode(board) for board in BOARDS}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in FOLDER.glob("*.json") if path not in wanted]
    if check:
        for path in stale:
            print(f"{path.name} is not what deploy/grafana/dashboards.py says: run make dashboards", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        if path in wanted:
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
