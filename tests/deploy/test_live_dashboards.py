"""Every query of every dashboard returns data from a real Prometheus that scrapes a real run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.dashboards import BOARDS
from orchestrator.runner.job import Job
from tests.deploy.prometheus import Prometheus, prometheus
from tests.fakes.run import FakeRun
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import Running, write_job

pytestmark = pytest.mark.deploy
QUERIES = sorted({query.expr for board in BOARDS for panel in board.panels for query in panel.queries})

#: What only the real parts export: vLLM's and Ray's own, and figures that the fake trainer and reward do not compute.
REAL_PARTS = (
    *("vllm:", "ray_", "nightshift_kl_nats", "nightshift_entropy_nats", "nightshift_clip_fraction_ratio"),
    *("nightshift_ratio_max", "nightshift_trained_positions_total", "nightshift_reward_part_mean"),
)
#: What only a run has to show whose servers sleep, which those on a CPU cannot.
SLEEP = ("nightshift_timing_sleep_seconds", "nightshift_timing_wake_seconds")
#: What only a run with faults has to show.
FAULTS = ('outcome="error"',)


def names(expr: str, some: tuple[str, ...]) -> bool:
    return any(name in expr for name in some)


def until_answered(server: Prometheus, missing: list[str]) -> Callable[[Job], Awaitable[None]]:
    """Watches a run until each query was answered, and ends it; those that are left stay in the list."""

    async def watch(job: Job) -> None:
        while missing:
            missing[:] = await asyncio.to_thread(server.unanswered, missing)
            await asyncio.sleep(0.5)
        job.stop()

    return watch


async def test_every_query_of_ours_returns_data_while_a_run_on_the_fakes_goes_on(tmp_path: Path) -> None:
    missing = [expr for expr in QUERIES if not names(expr, REAL_PARTS + SLEEP)]
    settings: dict[str, Any] = {"resources": {"ports": {"metrics": 0}}, "trainer": {"test_freq": 2, "save_freq": 2}}
    with prometheus(tmp_path / "prometheus", tmp_path / "runs") as server:
        async with FakeRun(tmp_path, prompts=400, test_prompts=2, token_s=0.03, **settings) as run:
            for engine in run.engines:
                engine.faults.plan("503", "g0000006.1", times=1)
                engine.faults.plan("positive_logprob", "g0000009.0", times=1)
                engine.faults.plan("400", "g0000012.", times=2)
            await run.run(watch=until_answered(server, missing), limit_s=300.0)
        assert missing == [], "no data within the run"
        exemplars = server.get(
            "query_exemplars", query="nightshift_stage_seconds_bucket", start=time.time() - 300, end=time.time()
        )
        assert all(len(one["labels"]["trace_id"]) == 32 for series in exemplars for one in series["exemplars"])
        assert {series["seriesLabels"]["stage"] for series in exemplars} >= {"generate", "reward", "optimizer_step"}
        firing = {series["metric"]["alertname"] for series in server.query('ALERTS{alertstate="firing"}')}
        assert not firing & {"NightshiftLedgerOutOfBalance", "NightshiftNoUsableServer"}


async def test_queries_of_sleep_return_data_while_servers_sleep_in_turns(tmp_path: Path) -> None:
    missing = [expr for expr in QUERIES if names(expr, SLEEP)]
    assert len(missing) == len(SLEEP)
    settings: dict[str, Any] = {"rollout": {"sleep_mode": True}, "pipeline": {"max_staleness": 0}}
    with prometheus(tmp_path / "prometheus", tmp_path / "runs") as server:
        async with FakeRun(tmp_path, prompts=400, token_s=0.03, resources={"ports": {"metrics": 0}}, **settings) as run:
            await run.run(watch=until_answered(server, missing), limit_s=300.0)
        assert missing == [], "no data within the run"


@pytest.mark.integration
@pytest.mark.timeout(2400)
def test_every_query_returns_data_while_a_run_on_the_real_parts_goes_on(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    job = write_job(
        tmp_path,
        model,
        trainer={"total_steps": 2000, "learning_rate": 1e-4, "micro_batch_size": 4, "test_freq": 2, "save_freq": 4},
        data={"train_files": ["train.jsonl"], "test_files": ["train.jsonl"], "max_prompt_length": 48},
        rewards=[{"function": "reward.py:with_parts", "timeout_s": 5}],
        pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 120},
        resources={"runs_dir": str(tmp_path / "runs"), "device": "cpu", "ports": {"metrics": 0}},
    )
    wanted = [expr for expr in QUERIES if not names(expr, FAULTS + SLEEP)]
    with prometheus(tmp_path / "prometheus", tmp_path / "runs") as server:
        running = Running(job)
        try:
            running.wait_for("step", timeout_s=900, step=3)
            began, missing = time.time(), wanted
            while (missing := server.unanswered(missing)) and time.time() < began + 600:
                time.sleep(1.0)
            if folder := os.environ.get("NIGHTSHIFT_DASHBOARD_IMAGES"):
                time.sleep(60)  # what is drawn shows a minute
                draw(server, Path(folder), began)
        finally:
            running.interrupt()
            ended = running.finish(600)
    assert missing == [], "no data within the run"
    assert ended.code == 130, ended.output


def draw(server: Prometheus, folder: Path, since: float) -> None:
    """Draws the dashboards into a folder, for the documentation."""
    from deploy.grafana.images import draw_boards

    draw_boards(BOARDS, lambda expr, start, end: server.range(expr, start, end, 1.0), folder, since - 10, time.time())
