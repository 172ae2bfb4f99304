"""A run from the first prompt to the last checkpoint, against services that speak the real contracts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.run import FakeRun
from tests.fakes.trainer import FakeTrainer

STALENESS = [0, 1, 2, None]


@pytest.mark.parametrize("staleness", STALENESS)
async def test_a_run_ends_well(tmp_path: Path, staleness: int | None) -> None:
    settings = {"max_staleness": staleness, "max_groups_in_flight": 6}
    async with FakeRun(tmp_path, prompts=16, token_s=0.001, pipeline=settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=8, staleness=staleness)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert run.events("job")[-1]["state"] == "succeeded"
        (summary,) = run.events("summary")
        assert summary["ledger"]["in_flight"] == 0
        assert [event["step"] for event in run.events("step")] == list(range(1, 9))
        assert all(line["metrics"]["staleness/max"] <= (staleness or 8) for line in run.metrics())
        assert {"timing/gen", "timing/reward", "timing/ref", "timing/sync", "timing/step", "reward/mean"} <= set(
            run.metrics()[0]["metrics"]
        )
        assert (run.run_dir / "checkpoints" / "actor" / "global_step_8" / "config.json").exists()
        assert list((run.run_dir / "checkpoints" / "manifests").iterdir())
        assert not list((run.run_dir / "spool").iterdir())
        assert run.engine.running == 0


async def test_o32_on_policy_ratios_are_zero_and_the_reward_rises(tmp_path: Path) -> None:
    settings = {"prompts": 40, "pipeline": {"max_staleness": 0}, "rollout": {"n": 8}}
    async with FakeRun(tmp_path, **settings, trainer={"learning_rate": 5.0}) as run:
        assert await run.run() == 0, run.error()
        metrics = [line["metrics"] for line in run.metrics()]
        assert max(values["log_ratio/abs_mean"] for values in metrics) < 1e-6
        assert (
            np.mean([m["reward/mean"] for m in metrics[-5:]]) > np.mean([m["reward/mean"] for m in metrics[:5]]) + 0.2
        )


@pytest.mark.parametrize("staleness", [0, 1])
async def test_generation_runs_while_the_trainer_trains(tmp_path: Path, staleness: int) -> None:
    # Both take so long that what this machine adds to them is small, whatever else it does.
    settings = {"max_staleness": staleness, "streaming": False}
    async with FakeRun(tmp_path, prompts=12, token_s=0.04, pipeline=settings) as run:
        run.trainer.faults.plan("slow", "Update", times=None, delay=0.4)
        run.engine.script = lambda request: [5] * 7 + [2]
        assert await run.run() == 0, run.error()
        (summary,) = run.events("summary")
        if staleness:
            assert summary["metrics"]["overlap_share"] > 0.1
        else:
            assert summary["metrics"]["overlap_share"] < 0.03


async def test_without_staleness_nothing_runs_at_once(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.002, pipeline={"max_staleness": 0}) as run:
        assert await run.run() == 0, run.error()
        for request in run.samples():
            assert request.version.endswith(f"/{int(request.request_id.split('.')[-3][1:]) // 2}")


async def test_weights_change_under_running_requests(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 2}, "rollout": {"max_response_length": 40}}
    async with FakeRun(tmp_path, prompts=24, token_s=0.004, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=2)
        spans = [len(sample.versions) for update in run.updates for sample in update.samples]
        assert max(spans) >= 2
        ratios = [line["metrics"]["log_ratio/abs_mean"] for line in run.metrics()]
        assert ratios[0] < 1e-6 < max(ratios)


async def test_drained_updates_give_one_version_a_sample(tmp_path: Path) -> None:
    settings = {"pipeline": {"weight_update": "drain"}, "rollout": {"max_response_length": 20}}
    async with FakeRun(tmp_path, prompts=12, token_s=0.002, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert {len(sample.versions) for update in run.updates for sample in update.samples} == {1}
        assert {call.path for call in run.engine.calls("/pause")} == {"/pause?mode=wait"}


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_the_bound_holds_where_lengths_differ_widely(tmp_path: Path, on_stale: str) -> None:
    settings = {"pipeline": {"max_staleness": 1, "on_stale": on_stale}, "rollout": {"max_response_length": 4}}
    async with FakeRun(tmp_path, prompts=24, **settings, trainer={"total_steps": 8}) as run:
        # Where they are waited for, some take longer; else they last until two more steps have been made.
        kind = {"wait": "slow", "drop": "behind@1"}[on_stale]
        run.engine.faults.plan(kind, times=None, delay=0.15, when=lambda request: request.order % 11 == 0)
        assert await run.run() == 0, run.error()
        audit(run, steps=8, staleness=1)
        dropped = balance(run).get("dropped_stale", 0)
        assert dropped == 0 if on_stale == "wait" else dropped > 0


async def test_deterministic_runs_are_identical(tmp_path: Path) -> None:
    weights = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"pipeline": {"max_staleness": 0, "deterministic": True}}
        async with FakeRun(folder, prompts=16, test_prompts=3, trainer={"test_freq": 2}, **settings) as run:
            assert await run.run() == 0, run.error()
            audit(run, steps=8, staleness=0)
            weights.append([update.weights for update in run.updates])
            _check_order(run)
    np.testing.assert_array_equal(weights[0], weights[1])


def _check_order(run: FakeRun) -> None:
    """Requests came in the order of their ids while the server held, one batch after the other."""
    ids = [request.request_id for request in run.samples()]
    assert ids == sorted(ids)
    assert all(request.paused for request in run.samples())
    assert len({request.sampling["seed"] for request in run.samples()}) == len(ids)


async def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4, tracking={"tensorboard": True}) as run:
        assert await run.run() == 0, run.error()
        (file,) = (run.run_dir / "tensorboard").iterdir()
        assert b"reward/mean" in file.read_bytes()


async def test_o37_sizes_that_do_not_divide(tmp_path: Path) -> None:
    settings = {"rollout": {"batch_size": 4}, "trainer": {"total_epochs": 2, "ranks": 2}}
    async with FakeRun(tmp_path, prompts=10, test_prompts=3, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=5, staleness=1)
        running = next(event for event in run.events("job") if event["state"] == "running")
        assert "5 steps of 4 prompts, 2 full ones an epoch and 2 carried over into the next" in running["detail"]
        rows = [row for step in run.rows_by_step().values() for row in step]
        assert sorted(rows) == sorted(2 * [f"train.parquet:{at}" for at in range(10)]) or len(set(rows)) == 10
        assert {line["metrics"]["eval/prompts"] for line in run.metrics("evaluation")} == {3.0}


async def test_o37_the_validation_mean_is_over_all_rows(tmp_path: Path) -> None:
    scores = dict(enumerate([1, 0, 1, 0, 1, 0, 1, 0, 1, 1]))
    async with FakeRun(tmp_path, prompts=4, test_prompts=10, scorers={"batch_samples": 4}) as run:
        run.scorers.reward = lambda sample: float(scores[sample["extra_info"]["index"]])
        assert await run.run() == 0, run.error()
        assert [line["metrics"]["eval/score"] for line in run.metrics("evaluation")] == [0.6, 0.6]
        assert run.metrics("evaluation")[0]["metrics"]["eval/scored"] == 10


async def test_o38d_nothing_is_asked_after_the_last_step(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"max_staleness": 2}) as run:
        assert await run.run() == 0, run.error()
        assert len(run.samples()) == 16
        before = len(run.engine.requests)
        await asyncio.sleep(0.7)
        assert len(run.engine.requests) == before


async def test_o47_nothing_is_held_in_memory_at_the_end(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        state = []

        async def watch(job: Job) -> None:
            await run.until(lambda: job.pipeline is not None, "the pipeline")
            state.append(job.pipeline.state)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0
        left = state[0]
        assert (left.running, left.ready, left.open, left.buffered_bytes) == ({}, {}, {}, 0)
        assert (left.ready_ages(), left.versions, list(left.backlog), left.failures) == ([], {}, [], [])


@pytest.mark.parametrize(("length", "most"), [(10_000, 4), (20_000, 2)])
async def test_o47_a_full_buffer_stops_new_groups_but_never_the_run(tmp_path: Path, length: int, most: int) -> None:
    """Four groups that may grow to 10,000 tokens a sample fit into a MiB, two of 20,000."""
    settings = {"pipeline": {"max_staleness": None, "max_groups_in_flight": 64, "buffer_mib": 1}}
    async with FakeRun(tmp_path, prompts=12, **settings, rollout={"max_response_length": length}) as run:
        run.engine.script = lambda request: [5, 6, 7, 2]
        seen = []

        async def watch(job: Job) -> None:
            while True:
                if job.pipeline is not None:
                    seen.append(len(job.pipeline.state.running))
                await asyncio.sleep(0.001)

        assert await run.run(watch=watch) == 0, run.error()
        assert 2 <= max(seen) <= most


@pytest.mark.parametrize("cap", [1, 3])
async def test_a_cap_below_the_batch_does_not_stop_the_run(tmp_path: Path, cap: int) -> None:
    settings = {"max_groups_in_flight": cap}
    async with FakeRun(tmp_path, prompts=16, pipeline=settings, rollout={"batch_size": 4}) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)


class ShiftedTrainer(FakeTrainer):
    """Its log-probs differ from the sampler's by a tenth in the first step, as under another precision."""

    shift = 0.1

    def _apply(self, request: Any, samples: list[Any], loss: Any) -> Any:
        answer = super()._apply(request, samples, loss)
        answer.metrics["log_ratio/abs_mean"] = self.shift if request.step == 1 else 2 * self.shift
        return answer


class ShiftedRun(FakeRun):
    """A run with such a trainer."""

    def _trainer(self, store: Path) -> FakeTrainer:
        return ShiftedTrainer(store)


@pytest.mark.parametrize(("limit", "warned"), [(0.05, True), (0.15, False)])
async def test_a_log_ratio_above_the_limit_in_the_first_step_is_warned_of_once(
    tmp_path: Path, limit: float, warned: bool
) -> None:
    async with ShiftedRun(tmp_path, prompts=8, algorithm={"max_log_ratio_warn": limit}) as run:
        assert await run.run() == 0, run.error()
        assert len(run.updates) == 4  # those after the first are above both limits, and not meant
        said = [text for text in run.warnings() if "log ratio" in text]
        assert len(said) == warned
        assert all("0.1 in the first step" in text and "precision, temperature" in text for text in said)
