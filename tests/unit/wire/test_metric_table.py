"""The table of metrics: names say their units, labels are bounded, every name of a step finds its metric."""

from __future__ import annotations

import re

import pytest

from nightshift.wire import metrics
from nightshift.wire.metrics import LABELS, METRICS, OTHER, UNLISTED, LabelBound, step_metric


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metrics_name_follows_prometheus_conventions(metric: metrics.Metric) -> None:
    assert re.fullmatch(r"nightshift_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    bare = metric.name.removesuffix("_total")
    if metric.unit:
        assert bare.endswith("_" + metric.unit), "the unit stands at the end of the name"
    assert not re.search(r"(_ms|_milliseconds|_mib|_mb|_percent)$", bare), "base units only"
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert not metric.help.endswith(".")
    assert set(metric.labels) <= LABELS.keys()


def test_names_are_unique_also_without_the_suffix_of_counters() -> None:
    names = [metric.name.removesuffix("_total") for metric in METRICS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "metric", "labels"),
    [
        ("timing/step", "nightshift_timing_step_seconds", {}),
        ("kl", "nightshift_kl_nats", {}),
        ("reward/mean", "nightshift_reward_mean", {}),
        ("reward/format/mean", "nightshift_reward_part_mean", {"part": "format"}),
        ("reward/a/b/mean", "nightshift_reward_part_mean", {"part": "a/b"}),
        ("rollout/rejected/logprobs", "nightshift_rollout_rejected_total", {"kind": "logprobs"}),
        ("my/own", "nightshift_unlisted", {"name": "my/own"}),
        ("reward//mean", "nightshift_unlisted", {"name": "reward//mean"}),
    ],
)
def test_a_name_of_a_step_finds_its_metric(name: str, metric: str, labels: dict[str, str]) -> None:
    found, values = step_metric(name)
    assert (found.name, values) == (metric, labels)


def test_the_names_that_the_design_fixes_are_all_there() -> None:
    fixed = ["gen", "reward", "ref", "values", "adv", "update_actor", "update_critic", "sync", "step"]
    names = [f"timing/{name}" for name in fixed]
    names += ["reward/mean", "loss/actor", "loss/critic", "kl", "entropy", "clip_fraction", "grad_norm"]
    names += ["response_length/mean", "staleness/max", "bubble/trainer", "bubble/rollout"]
    assert [name for name in names if step_metric(name)[0] is UNLISTED] == []


def test_labels_are_bounded() -> None:
    bound, parts = LabelBound(), metrics.BY_NAME["nightshift_reward_part_mean"]
    kept = [bound.bound(parts, {"part": f"p{at}"})["part"] for at in range(100)]
    assert kept[: LABELS["part"].most] == [f"p{at}" for at in range(LABELS["part"].most)]
    assert set(kept[LABELS["part"].most :]) == {OTHER}
    assert bound.bound(parts, {"part": "p3"}) == {"part": "p3"}
    warnings = metrics.BY_NAME["nightshift_warnings_total"]
    assert bound.bound(warnings, {"role": "anything else"}) == {"role": OTHER}
    with pytest.raises(ValueError, match="has the labels"):
        bound.bound(warnings, {"server": "a"})
