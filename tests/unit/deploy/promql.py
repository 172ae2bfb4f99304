"""Names of series in a PromQL expression, and those of them that nothing exports."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from nightshift.wire.metrics import METRICS

ROOT = Path(__file__).resolve().parents[3]
_NAME = re.compile(r"\bnightshift[_:][a-zA-Z0-9_:]*")


def exported() -> set[str]:
    """Names that the table's metrics have in Prometheus, and those of the recording rules."""
    names = set()
    for metric in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + suffix for suffix in suffixes}
    rules = yaml.safe_load((ROOT / "deploy/helm/nightshift/files/rules.yaml").read_text())
    return names | {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}


def unknown_names(expression: str) -> set[str]:
    """Names of Nightshift's in the expression that nothing exports."""
    return set(_NAME.findall(expression)) - exported()
