"""Dashboards: what is checked in is what the code makes, every query parses and reads what is exported."""

from __future__ import annotations

import json
import re

import promql_parser
import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.build import FOLDER, encode
from deploy.grafana.dashboards import BOARDS
from deploy.grafana.panels import Board, Query
from nightshift.wire.metrics import METRICS
from tests.unit.deploy.promql import unknown_names

QUERIES = [(board, panel.title, query) for board in BOARDS for panel in board.panels for query in panel.queries]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_the_file_is_what_the_code_makes(board: Board) -> None:
    assert (FOLDER / f"{board.uid}.json").read_text() == encode(board), "run make dashboards"


def test_no_other_file_lies_beside_them() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {board.uid for board in BOARDS}


@pytest.mark.parametrize(
    ("board", "title", "query"), QUERIES, ids=lambda value: getattr(value, "uid", None) or str(value)[:60]
)
def test_a_query_parses_and_reads_what_is_exported(board: Board, title: str, query: Query) -> None:
    promql_parser.parse(query.expr.replace("$__rate_interval", "1m"))
    assert unknown_names(query.expr) == set()
    for selector in re.findall(r"(?:nightshift|vllm|ray)[_:][\w:]*(\{[^}]*\})?", query.expr):
        assert "$run_id" in selector, "every series is narrowed to the chosen runs"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_can_read_the_file(board: Board) -> None:
    raw = json.loads((FOLDER / f"{board.uid}.json").read_text())
    read = Dashboard.from_json(raw)
    assert (read.uid, read.title) == (board.uid, board.title)
    ids = [panel["id"] for panel in raw["panels"]]
    assert len(set(ids)) == len(ids), "a panel of its own address each"
    assert len([panel for panel in raw["panels"] if panel["type"] != "row"]) == len(board.panels)
    titles = [panel.title for panel in board.panels]
    assert len(set(titles)) == len(titles)
    boxes = [panel["gridPos"] for panel in raw["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    cells = [(x, y) for b in boxes for x in range(b["x"], b["x"] + b["w"]) for y in range(b["y"], b["y"] + b["h"])]
    assert len(set(cells)) == len(cells), "panels overlap"


def test_uids_are_unique_and_short_enough() -> None:
    uids = [board.uid for board in BOARDS]
    assert len(set(uids)) == len(uids)
    assert max(map(len, uids)) <= 40


def test_every_metric_is_shown_somewhere() -> None:
    shown = " ".join(query.expr for _, _, query in QUERIES)
    recorded = (FOLDER.parent / "rules.yaml").read_text()
    #: Of a critic, a GPU or an algorithm of one's own; details that docs/observability.md lists.
    unshown = {metric.name for metric in METRICS if metric.name not in shown and metric.name not in recorded}
    assert unshown == {
        *("nightshift_timing_values_seconds", "nightshift_timing_update_critic_seconds", "nightshift_loss_critic"),
        *(
            "nightshift_loss_policy",
            "nightshift_kl_penalty_nats",
            "nightshift_memory_gpu_peak_bytes",
            "nightshift_unlisted",
        ),
        *("nightshift_response_length_min_tokens", "nightshift_staleness_min_versions"),
        *("nightshift_throughput_samples_per_second", "nightshift_throughput_response_tokens_per_second"),
        *("nightshift_eval_scored_prompts", "nightshift_eval_prompts", "nightshift_eval_response_length_tokens"),
        *("nightshift_eval_seconds", "nightshift_trained_sequences_total", "nightshift_kl_clamped_tokens_total"),
        *("nightshift_advantage_single_groups_total", "nightshift_advantage_empty_samples_total"),
        *("nightshift_advantage_clamped_tokens_total", "nightshift_stale_response_length_mean_tokens"),
        *("nightshift_preference_chosen_reward", "nightshift_preference_rejected_reward"),
        *("nightshift_preference_margin", "nightshift_preference_accuracy_ratio"),
        "nightshift_rollout_filtered_groups_total",
        *("nightshift_timing_teacher_seconds", "nightshift_eval_margin", "nightshift_refill_limit_groups"),
        *("nightshift_refill_kv_usage_ratio", "nightshift_refill_running_requests", "nightshift_rollout_servers"),
        *("nightshift_refill_waiting_requests", "nightshift_rollout_usable_servers"),
        "nightshift_refill_preemptions_total",
        *("nightshift_critic_grad_norm", "nightshift_critic_lr", "nightshift_memory_critic_peak_bytes"),
        *("nightshift_critic_value_mean", "nightshift_critic_return_mean"),
        *("nightshift_critic_explained_variance_ratio", "nightshift_critic_clip_fraction_ratio"),
        *("nightshift_update_parts", "nightshift_update_attempts_total"),
    }
