"""A run's metrics as Prometheus sees them: scraped while it goes on, all of them documented."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from nightshift.wire.metrics import BY_NAME, LABELS, METRICS, OTHER
from orchestrator.api.metrics import targets_file
from orchestrator.runner.job import Job
from tests.fakes.run import ROOT, FakeRun

PAGE = ROOT / "docs" / "observability.md"
#: Deadlines that a busy machine keeps too: none of these tests is about time.
ON = {
    "resources": {"ports": {"metrics": 0}},
    "pipeline": {"role_timeout_s": 90.0},
    "scorers": {"timeout_s": 60.0},
    "rollout": {"request_timeout_s": 60.0},
}
#: Metrics that a run on the fakes may have no occasion for.
NEVER_HERE = {
    # of a critic, of a KL in the reward, of a GPU, of an algorithm of one's own
    *("nightshift_timing_values_seconds", "nightshift_timing_update_critic_seconds", "nightshift_loss_critic"),
    *("nightshift_kl_penalty_nats", "nightshift_memory_gpu_peak_bytes", "nightshift_unlisted"),
    *("nightshift_critic_value_mean", "nightshift_critic_return_mean"),
    *("nightshift_critic_explained_variance_ratio", "nightshift_critic_clip_fraction_ratio"),
    *("nightshift_critic_grad_norm", "nightshift_critic_lr", "nightshift_memory_critic_peak_bytes"),
    *("nightshift_timing_teacher_seconds", "nightshift_eval_margin", "nightshift_refill_limit_groups"),
    # of servers whose load was looked at, which a run this short may end before
    *("nightshift_refill_kv_usage_ratio", "nightshift_refill_running_requests"),
    *("nightshift_refill_waiting_requests", "nightshift_refill_preemptions_total"),
    # of servers that sleep
    *("nightshift_timing_sleep_seconds", "nightshift_timing_wake_seconds"),
    # of groups that are filtered or dropped, of pairs
    *("nightshift_rollout_filtered_groups_total", "nightshift_stale_response_length_mean_tokens"),
    *("nightshift_preference_chosen_reward", "nightshift_preference_rejected_reward"),
    *("nightshift_preference_margin", "nightshift_preference_accuracy_ratio"),
    # that the fake trainer does not compute
    *("nightshift_loss_policy", "nightshift_kl_nats", "nightshift_entropy_nats", "nightshift_clip_fraction_ratio"),
    *("nightshift_ratio_max", "nightshift_trained_positions_total", "nightshift_kl_clamped_tokens_total"),
}


def samples(text: str) -> Iterator[tuple[str, Any]]:
    """(metric of the table, sample) of an exposition; the process's own metrics are left out."""
    for family in parse(text):
        for sample in family.samples:
            name = (
                re.sub(r"(_bucket|_sum|_count|_created)$", "", sample.name)
                if sample.name not in BY_NAME
                else sample.name
            )
            if name.startswith("nightshift_"):
                # Classic text has the time of creation as a gauge, named after the counter without its suffix.
                yield name if name in BY_NAME else f"{name}_total", sample


async def scrapes(run: FakeRun) -> AsyncIterator[str]:
    """What the run exports, again and again until it ends."""
    await run.until(lambda: run.events("metrics"), "the address of the metrics")
    url = run.events("metrics")[-1]["url"]
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                answer = await client.get(url)
            except httpx.TransportError:
                return
            assert answer.status_code == 200
            yield answer.text
            await asyncio.sleep(0.05)


async def scraped_run(folder: Path, **settings: Any) -> tuple[FakeRun, str]:
    """A run of a few steps with failures on the way, and what it exported at its last step."""
    last = ""

    async def watch(job: Job) -> None:
        nonlocal last
        async for text in scrapes(run):
            last = text

    async with FakeRun(folder, prompts=12, test_prompts=2, token_s=0.004, **ON, **settings) as run:
        run.engine.faults.plan("503", "g0000002.1", times=1)
        run.engine.faults.plan("positive_logprob", "g0000003.0", times=1)
        run.engine.faults.plan("400", "g0000004.", times=2)  # both of its samples: the group fails, with a warning
        assert await run.run(watch=watch, limit_s=120.0) == 0, run.error()
        return run, last


async def test_every_metric_of_a_run_is_in_the_table_and_every_one_of_the_table_is_exported(tmp_path: Path) -> None:
    _, text = await scraped_run(tmp_path)
    seen = {name for name, _ in samples(text)}
    assert seen - BY_NAME.keys() == set(), "exported, but not in the table"
    unlisted = {sample.labels["name"] for name, sample in samples(text) if name == "nightshift_unlisted"}
    assert unlisted == set(), "metrics of a step that nightshift/wire/metrics.py does not know: add them, run make docs"
    described = {family.name for family in parse(text)}
    known = {metric.name.removesuffix("_total") for metric in METRICS}
    assert {name for name in described if name.startswith("nightshift_")} - {f"{n}_created" for n in known} <= known
    assert {metric.name for metric in METRICS} - seen - NEVER_HERE - {"nightshift_reward_part_mean"} == set()


async def test_labels_of_a_run_are_those_of_the_table(tmp_path: Path) -> None:
    run, text = await scraped_run(tmp_path)
    for name, sample in samples(text):
        labels = dict(sample.labels)
        assert labels.pop("run_id") == run.run_dir.name
        labels.pop("le", None)
        assert set(labels) == set(BY_NAME[name].labels), name
        for label, value in labels.items():
            assert value != OTHER, f"{name} {label}: a value that the table does not know"
            assert not LABELS[label].values or value in LABELS[label].values


async def test_the_ledger_balances_at_every_scrape_and_the_state_is_that_of_the_run(tmp_path: Path) -> None:
    texts: list[str] = []

    async def watch(job: Job) -> None:
        async for text in scrapes(run):
            texts.append(text)

    steps = {"trainer": {"total_steps": 12}}
    async with FakeRun(tmp_path, prompts=24, token_s=0.01, **ON, **steps) as run:
        assert await run.run(watch=watch, limit_s=120.0) == 0, run.error()
    running = [dict_of(text) for text in texts if "nightshift_ledger_groups{" in text]
    assert len(running) > 5
    assert {found["nightshift_ledger_imbalance_groups"] for found in running} == {0.0}
    assert max(found["nightshift_running_groups"] for found in running) >= 2
    assert {found["nightshift_staleness_bound_versions"] for found in running} == {1.0}
    assert max(found['nightshift_server_state{server="rollout-0",state="healthy"}'] for found in running) == 1
    assert running[-1]["nightshift_trainer_version"] >= 4
    busy = [found['nightshift_busy_seconds_total{role="rollout"}'] for found in running]
    assert busy == sorted(busy)
    assert busy[-1] > 0


def dict_of(text: str) -> dict[str, float]:
    found = {}
    for family in parse(text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()) if k != "run_id")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def test_prometheus_is_told_where_to_scrape_while_the_run_goes_on(tmp_path: Path) -> None:
    targets: list[Any] = []

    async def watch(job: Job) -> None:
        while True:
            if (file := targets_file(run.run_dir)).exists():
                targets.append(json.loads(file.read_text()))
            await asyncio.sleep(0.01)

    async with FakeRun(tmp_path, servers=2, **ON) as run:
        assert await run.run(watch=watch, limit_s=120.0) == 0, run.error()
    jobs = {group["labels"]["job"]: group["targets"] for group in targets[0]}
    assert jobs["nightshift"] == [run.events("metrics")[0]["url"].split("/")[2]]
    assert jobs["nightshift-rollout"] == [engine.address["url"].split("/")[2] for engine in run.engines]
    assert not targets_file(run.run_dir).exists()


async def test_without_a_port_nothing_is_served(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=2) as run:
        assert await run.run() == 0, run.error()
    assert run.events("metrics") == []


async def test_a_port_that_is_taken_is_refused_by_name(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, FakeRun(tmp_path, prompts=2, resources={"ports": {"metrics": port}}) as run:
        assert await run.run() == 2
        assert f"port {port} for metrics is taken" in run.error()
        assert "resources.ports.metrics" in run.error()


def test_the_documentation_holds_the_table() -> None:
    reference = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/metrics_reference.py")))
    page = PAGE.read_text()
    assert reference.with_tables(page) == page, "run make docs"


@pytest.mark.parametrize("mark", ["<!-- metrics: made by make docs -->", "<!-- end of labels -->"])
def test_a_page_without_a_mark_is_noticed(mark: str) -> None:
    reference = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/metrics_reference.py")))
    with pytest.raises(ValueError, match="lacks the marks"):
        reference.with_tables(PAGE.read_text().replace(mark, ""))


async def test_updates_that_rounding_takes_are_told_once_and_not_at_a_rate_of_zero(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, trainer={"warmup_steps": 1, "learning_rate": 2.0}) as run:
        run.trainer.changed_fraction = 0.0
        assert await run.run() == 0, run.error()
        told = [event["message"] for event in run.events("warning") if "lost in rounding" in event["message"]]
        assert ["at step 2" in message for message in told] == [True]
