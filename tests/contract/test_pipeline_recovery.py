"""A trainer that dies within a run: another one goes on from the last checkpoint, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.runner.job import Job, Losses
from orchestrator.runner.services import TrainerAddress
from tests.fakes.audit import audit, balance
from tests.fakes.run import FakeRun

DETERMINISTIC = {"pipeline": {"max_staleness": 0, "deterministic": True, "role_timeout_s": 10.0}}


async def uninterrupted(folder: Path, **settings: Any) -> tuple[dict[int, list[str]], np.ndarray]:
    async with FakeRun(folder, **settings) as run:
        assert await run.run() == 0, run.error()
        return run.rows_by_step(), run.trainer.weights


@pytest.mark.parametrize("method", ["Update", "Publish", "Save"])
async def test_a_rank_that_dies_in_a_deterministic_run_changes_nothing(tmp_path: Path, method: str) -> None:
    settings = {"prompts": 16, "trainer": {"save_freq": 3}, **DETERMINISTIC}
    rows, weights = await uninterrupted(tmp_path / "whole", **settings)
    async with FakeRun(tmp_path / "broken", **settings) as run:
        fault = run.trainer.faults.plan("rank_died", method, skip={"Update": 4, "Publish": 5, "Save": 1}[method])

        async def watch(job: Job) -> None:
            await run.until(lambda: fault.used, "the fault")
            await run.replace_trainer(0.1)
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=8, staleness=0)
        assert run.rows_by_step() == rows
        np.testing.assert_array_equal(run.trainer.weights, weights)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert any("rank 0 died" in text and "last checkpoint" in text for text in run.warnings())
        lineages = [event["lineage"] for event in run.events("job") if event["state"] == "running"]
        assert lineages == [0, 1]


@pytest.mark.parametrize("staleness", [1, None])
async def test_a_trainer_that_is_killed_again_and_again_loses_and_doubles_nothing(
    tmp_path: Path, staleness: int | None
) -> None:
    settings = {"pipeline": {"max_staleness": staleness, "max_groups_in_flight": 6}, "trainer": {"save_freq": 2}}
    async with FakeRun(tmp_path, prompts=40, token_s=0.002, **settings) as run:

        async def watch(job: Job) -> None:
            seen = 0  # updates of trainers that are gone: the next one must have made a step before it is killed
            for step in (3, 8, 9, 15):
                await run.until(lambda: any(u.step >= step for u in run.updates[seen:]), f"step {step}")  # noqa: B023
                await run.replace_trainer(0.1)
                seen = len(run.updates)
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=20, staleness=staleness)
        assert balance(run)["trained"] == 40
        assert run.manifest(20)["lineage"] == 4


async def test_a_trainer_that_dies_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) == 2, "step 2")
            await run.replace_trainer(0.1)
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


#: A checkpoint at each step that the bound on their share of the time leaves free.
OFTEN = {"save_minutes": 1e-6}


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_default_job_whose_trainer_dies_goes_on_from_the_checkpoint_of_the_clock(
    tmp_path: Path, staleness: int
) -> None:
    """``trainer.save_freq`` is 0, as it is by default: the clock alone asks for checkpoints."""
    settings = {"pipeline": {"max_staleness": staleness}, "trainer": OFTEN, "checkpoint": {"keep": None}}
    async with FakeRun(tmp_path, prompts=24, token_s=0.002, **settings) as run:
        assert run.spec.trainer.save_freq == 0
        saved: list[int] = []

        async def watch(job: Job) -> None:
            await run.until(lambda: run.events("checkpoint"), "a checkpoint")
            made = len(run.updates)
            await run.until(lambda: len(run.updates) > made, "a step after it")
            await run.replace_trainer(0.1)
            saved.extend(event["step"] for event in run.events("checkpoint"))
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=12, staleness=staleness)
        assert balance(run)["trained"] == 24
        starts = [event["step"] for event in run.events("job") if event["state"] == "running"]
        assert starts[0] == 0
        assert starts[1] >= saved[0] > 0
        # They were there to go on from; the last one, which nobody's clock asked for, is what stays.
        folders = {kind: sorted(path.name for path in run.checkpoint_folders(kind)) for kind in ("trainer", "actor")}
        assert folders == {"trainer": ["global_step_12"], "actor": ["global_step_12"]}


async def test_a_run_that_ends_on_a_checkpoint_of_the_clock_has_its_export(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, token_s=0.002, trainer=OFTEN) as run:

        async def watch(job: Job) -> None:
            # Stopped within the save: no further step comes between it and the end.
            await run.trainer.saving.wait()
            job.stop()
            await asyncio.sleep(60)

        fault = run.trainer.faults.plan("slow", "Save", delay=0.5)
        assert await run.run(watch=watch) == 130
        assert fault.used
        (state,) = run.checkpoint_folders("trainer")
        assert [path.name for path in run.checkpoint_folders("actor")] == [state.name]
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=1)


async def test_a_runner_that_dies_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """The trainer that it finds has made steps and has no way back: another one begins with the initial weights."""
    settings = {"prompts": 16, **DETERMINISTIC}
    rows, weights = await uninterrupted(tmp_path / "whole", **settings)
    async with FakeRun(tmp_path / "broken", **settings) as run:
        process = await run.spawn()
        await run.until(lambda: len(run.updates) >= 2, "step 2")
        process.kill()
        await process.wait()
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=8, staleness=0)
        assert run.trainer.incarnation == 2
        assert run.rows_by_step() == rows
        np.testing.assert_array_equal(run.trainer.weights, weights)


async def test_a_step_that_kills_every_trainer_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, trainer={"save_freq": 1}) as run:
        fault = run.trainer.faults.plan("rank_died", "Update", skip=3, times=None)

        async def watch(job: Job) -> None:
            for death in (1, 2):
                await run.until(lambda: fault.used == death, f"death {death}")  # noqa: B023
                await run.replace_trainer(0.1)
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 1
        assert fault.used == 3
        assert "[trainer] rank 0 died during update" in run.error()


async def test_a_trainer_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    starts = {"start_timeout_s": 0.3}
    async with FakeRun(
        tmp_path,
        prompts=12,
        trainer={"save_freq": 1, **starts},
        rollout={"batch_size": 2, "n": 2, "max_response_length": 8, **starts},
        scorers={"batch_wait_ms": 1.0, **starts},
    ) as run:
        run.trainer.faults.plan("rank_died", "Update", skip=2, times=None)
        assert await run.run() == 1
        assert "[trainer] the trainer was not started again within 0.9 s" in run.error()


async def test_ctrl_c_while_the_trainer_is_away_interrupts_the_run(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, trainer={"save_freq": 1}) as run:
        fault = run.trainer.faults.plan("rank_died", "Update", skip=2, times=None)

        async def watch(job: Job) -> None:
            await run.until(lambda: fault.used, "the fault")
            await asyncio.sleep(0.3)
            job.stop()
            await asyncio.sleep(60)

        assert await run.run(watch=watch) == 130
        fault.times = 0
        await run.replace_trainer(0.1)
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=6, staleness=1)


async def test_an_update_of_the_weights_that_was_broken_off_is_ended_before_the_next(tmp_path: Path) -> None:
    """A runner killed in the middle of a push leaves a server with an update open, and paused."""
    async with FakeRun(tmp_path, prompts=12, trainer={"save_freq": 1}) as run:
        hung = run.engine.route_faults.plan("hang", "/update_weights", skip=2)
        process = await run.spawn()
        await run.until(lambda: hung.used, "the push of step 2")
        process.kill()
        await process.wait()
        hung.times = 0
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=6, staleness=1)


async def test_the_start_of_an_update_that_fails_once_is_made_again(tmp_path: Path) -> None:
    """Between the failure and the end of the open update, the last call of a killed sender may have ended it."""
    async with FakeRun(tmp_path, prompts=12) as run:
        run.engine.route_faults.plan("500", "/start_weight_update", skip=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert not any("left out" in text for text in run.warnings())


@pytest.mark.parametrize("method", ["Update", "Publish", "Save"])
async def test_a_trainer_that_cancels_a_call_is_asked_again(tmp_path: Path, method: str) -> None:
    async with FakeRun(tmp_path, prompts=12, trainer={"save_freq": 2}) as run:
        run.trainer.faults.plan("cancel", method, skip=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)


@pytest.mark.parametrize("application", ["reward", "reference"])
async def test_a_scorer_that_cancels_a_call_is_asked_again(tmp_path: Path, application: str) -> None:
    async with FakeRun(tmp_path, prompts=12) as run:
        run.scorers.faults.plan("cancel", application, skip=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


def test_losses_count_from_the_furthest_step_on() -> None:
    losses = Losses()
    trainer = TrainerAddress("grpc://x", "1")
    for step, hopeless in ((0, False), (0, False), (4, False), (2, False), (4, True)):
        losses.note(trainer, step)
        assert losses.hopeless is hopeless
