"""What the exporter makes of a run's events and readings, and how expositions are merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from orchestrator.api.metrics import Reading, RunMetrics, merge

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def values(metrics: RunMetrics) -> dict[str, float]:
    """Series -> value, without the run's label."""
    found = {}
    for family in parse(metrics.exposition()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "run_id")
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def span(name: str, seconds: float, **fields: Any) -> dict[str, Any]:
    event = {"kind": "span", "name": name, "trace_id": TRACE, "start": 10.0, "end": 10.0 + seconds, "status": "unset"}
    return event | {"attributes": {}} | fields


def test_a_step_sets_gauges_and_adds_to_counters() -> None:
    metrics = RunMetrics("r1")
    for reward in (0.25, 0.5):
        step = {"reward/mean": reward, "samples": 8, "reward/unscored": 1, "kl": None, "rollout/rejected/form": 2.0}
        metrics.on_event({"kind": "step", "metrics": step | {"timing/step": 2.0, "custom": 3.0}})
    got = values(metrics)
    assert got["nightshift_reward_mean{}"] == 0.5
    assert got["nightshift_trained_samples_total{}"] == 16
    assert got["nightshift_reward_unscored_total{}"] == 2
    assert got["nightshift_rollout_rejected_total{kind=form}"] == 4
    assert got["nightshift_steps_total{}"] == 2
    assert got["nightshift_step_seconds_sum{}"] == 4
    assert got["nightshift_unlisted{name=custom}"] == 3
    assert "nightshift_kl_nats{}" not in got, "a value that is missing is no 0"


def test_every_series_names_the_run() -> None:
    metrics = RunMetrics("r1")
    metrics.on_event({"kind": "step", "metrics": {"reward/mean": 1.0}})
    ours = [s for f in parse(metrics.exposition()[0].decode()) for s in f.samples if s.name.startswith("nightshift_")]
    assert {sample.labels["run_id"] for sample in ours} == {"r1"}


def test_spans_become_stages_with_the_trace_as_exemplar() -> None:
    metrics = RunMetrics("r1")
    metrics.on_event(span("generate", 0.2, attributes={"gen_ai.usage.output_tokens": 20}))
    metrics.on_event(span("reward", 2.0, status="error"))
    metrics.on_event(span("llm_request", 2.0))  # vLLM's own: not one of our stages
    got = values(metrics)
    assert got["nightshift_stage_seconds_count{outcome=ok,stage=generate}"] == 1
    assert got["nightshift_stage_seconds_count{outcome=error,stage=reward}"] == 1
    assert not any("llm_request" in name for name in got)
    text, kind = metrics.exposition(OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    exemplars = {
        sample.name: sample.exemplar.labels["trace_id"]
        for family in parse_openmetrics(text.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars == {"nightshift_stage_seconds_bucket": TRACE, "nightshift_response_tokens_bucket": TRACE}


def test_the_jobs_state_is_one_of_several() -> None:
    metrics = RunMetrics("r1")
    metrics.on_event({"kind": "job", "state": "starting"})
    metrics.on_event({"kind": "job", "state": "running"})
    got = {name: value for name, value in values(metrics).items() if "job_state" in name}
    assert got.pop("nightshift_job_state{state=running}") == 1
    assert set(got.values()) == {0.0}


def test_state_is_read_at_each_scrape_and_a_failure_of_it_leaves_the_rest() -> None:
    metrics, ready = RunMetrics("r1"), 3.0

    def read() -> Iterator[Reading]:
        yield "nightshift_ready_groups", {}, ready
        yield "nightshift_server_state", {"server": "a", "state": "healthy"}, 1.0

    metrics.watch(read)
    assert values(metrics)["nightshift_ready_groups{}"] == 3
    ready = 4.0
    assert values(metrics)["nightshift_ready_groups{}"] == 4
    assert values(metrics)["nightshift_server_state{server=a,state=healthy}"] == 1

    def broken() -> Iterator[Reading]:
        yield "nightshift_ready_groups", {}, 1.0
        raise RuntimeError("the state is away")

    metrics.watch(broken)
    metrics.on_event({"kind": "step", "metrics": {"reward/mean": 1.0}})
    got = values(metrics)
    assert got["nightshift_reward_mean{}"] == 1
    assert "nightshift_ready_groups{}" not in got


@pytest.mark.parametrize("event", [{"kind": "span", "name": "generate"}, {"kind": "step", "metrics": {"kl": "x"}}])
def test_an_event_that_cannot_be_read_fails_nothing(event: dict[str, Any]) -> None:
    metrics = RunMetrics("r1")
    metrics.on_event(event)
    metrics.on_event({"kind": "warning", "role": "reward", "message": "m"})
    assert values(metrics)["nightshift_warnings_total{role=reward}"] == 1


def test_expositions_of_several_runs_merge_into_one() -> None:
    texts = []
    for run in ("r1", "r2"):
        metrics = RunMetrics(run)
        metrics.on_event({"kind": "step", "metrics": {"reward/mean": 1.0, "timing/step": 1.0}})
        metrics.watch(lambda: iter([("nightshift_ready_groups", {}, 1.0)]))
        texts.append(metrics.exposition()[0])
    families = list(parse(merge(texts).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    by_name = {family.name: family for family in families}
    assert [s.labels["run_id"] for s in by_name["nightshift_reward_mean"].samples] == ["r1", "r2"]
    assert [s.labels["run_id"] for s in by_name["nightshift_ready_groups"].samples] == ["r1", "r2"]
    assert merge([]) == b""
