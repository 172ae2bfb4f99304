"""Alerts and recording rules: they parse, use metrics that exist, have a runbook and both kinds of tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.unit.deploy.promql import unknown_names

ROOT = Path(__file__).resolve().parents[3]
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/helm/nightshift/files/rules.yaml").read_text())
CASES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/tests.yaml").read_text())
ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL if "alert" in rule]


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_parses_and_reads_metrics_that_exist(rule: dict[str, Any]) -> None:
    promql_parser.parse(rule["expr"])
    assert unknown_names(rule["expr"]) == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_means_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["for"], "one bad scrape is no alert"
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (\S+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_every_runbook_belongs_to_an_alert_and_has_its_three_parts() -> None:
    sections = re.split(r"^## ", (ROOT / "docs/runbooks.md").read_text(), flags=re.MULTILINE)[1:]
    assert {section.split("\n")[0] for section in sections} == {rule["alert"] for rule in ALERTS}
    for section in sections:
        assert re.findall(r"^\*\*(\w+)\*\*", section, re.MULTILINE) == ["Means", "Look", "Do"], section.split("\n")[0]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(rule: dict[str, Any]) -> None:
    cases = [one for case in CASES["tests"] for one in case.get("alert_rule_test", [])]
    outcomes = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]}
    assert outcomes == {True, False}


def test_every_recorded_series_is_used_somewhere() -> None:
    dashboards = "".join(path.read_text() for path in (ROOT / "deploy/helm/nightshift/files/dashboards").glob("*.json"))
    text = dashboards + "".join(rule["expr"] for rule in ALERTS)
    assert [rule["record"] for rule in ALL if "record" in rule and rule["record"] not in text] == []
