"""Stopping, killing and resuming a run: nothing is trained twice, nothing is lost, and the order stays."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.cli.runs import RUNNER_LOCK, hold
from nightshift.config import JobSpec
from nightshift.config.load import write_resolved
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance, final_updates
from tests.fakes.run import FakeRun, rows
from tests.fixtures.rows import write_parquet

DETERMINISTIC: dict[str, Any] = {"pipeline": {"max_staleness": 0, "deterministic": True}}
TWO_EPOCHS: dict[str, Any] = {"total_epochs": 2, "lr_schedule": "cosine", "warmup_steps": 2}


def stop_after(run: FakeRun, step: int):
    async def watch(job: Job) -> None:
        await run.until(lambda: len(run.updates) >= step, f"step {step}")
        job.stop()
        await asyncio.Event().wait()

    return watch


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, list[str]], list[float], np.ndarray]:
    """Rows by step, learning rates and final weights of the same run, uninterrupted; saving and evaluating are free."""

    async def make() -> tuple[dict[int, list[str]], list[float], np.ndarray]:
        settings = {"prompts": 12, **DETERMINISTIC, "trainer": TWO_EPOCHS}
        async with FakeRun(tmp_path_factory.mktemp("reference"), **settings) as run:
            assert await run.run() == 0, run.error()
            return run.rows_by_step(), [update.learning_rate for update in run.updates], run.trainer.weights

    return asyncio.run(make())


async def test_o42_a_stopped_run_goes_on_exactly(tmp_path: Path, reference: Any) -> None:
    settings = {"prompts": 12, **DETERMINISTIC, "trainer": TWO_EPOCHS}
    rows, rates, weights = reference
    assert len(rows) == 12
    epochs = [[row for step in part for row in rows[step]] for part in (range(1, 7), range(7, 13))]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]

    async with FakeRun(tmp_path, **settings) as run:
        assert await run.run(watch=stop_after(run, 7)) == 130
        assert run.events("job")[-1]["state"] == "interrupted"
        assert (run.manifest(7)["step"], run.manifest(7)["lineage"]) == (7, 0)
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=0)
        assert run.rows_by_step() == rows
        assert [update.learning_rate for update in final_updates(run)] == rates
        np.testing.assert_array_equal(run.trainer.weights, weights)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert {update.new.split("/")[1] for update in run.updates} == {"0", "1"}


async def test_o42_kill_during_a_save(tmp_path: Path, reference: Any) -> None:
    settings = {"prompts": 12, **DETERMINISTIC, "trainer": {**TWO_EPOCHS, "save_freq": 1}}
    rows, _, weights = reference
    async with FakeRun(tmp_path, **settings) as run:
        run.trainer.faults.plan("half", "Save", skip=7)
        process = await run.spawn()
        half = run.run_dir / "checkpoints" / "trainer" / "global_step_8.tmp-half"
        await run.until(half.exists, "the save of step 8")
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        assert len(run.updates) == 8
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=0)
        assert any("global_step_8.tmp-half was never completed" in text for text in run.warnings())
        assert [update.step for update in run.updates][7:9] == [8, 8]
        assert run.rows_by_step() == rows
        np.testing.assert_array_equal(run.trainer.weights, weights)
        assert balance(run) == {"issued": 24, "trained": 24}


@pytest.mark.parametrize("moment", ["update", "generation", "evaluation"])
async def test_o42_kill_between_saves_in_deterministic_mode(tmp_path: Path, reference: Any, moment: str) -> None:
    """Steps after the last commit are made again, from the same groups, with groups of later steps kept back."""
    trainer = {**TWO_EPOCHS, "save_freq": 3, "test_freq": 2}
    settings = {"prompts": 12, "test_prompts": 2, **DETERMINISTIC, "trainer": trainer}
    rows, _, weights = reference
    async with FakeRun(tmp_path, token_s=0.002, **settings) as run:
        hung = {
            "update": lambda: run.trainer.faults.plan("hang", "Update", skip=7),
            "generation": lambda: run.engine.faults.plan("hang", "g0000017.0", times=1),
            "evaluation": lambda: run.engine.faults.plan("hang", "eval8.1", times=1),
        }[moment]()
        process = await run.spawn()
        await run.until(lambda: hung.used and not hung.skip, "the moment")
        await asyncio.sleep(0.1)
        process.kill()
        await process.wait()
        hung.times = 0
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=0)
        assert run.rows_by_step() == rows
        np.testing.assert_array_equal(run.trainer.weights, weights)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert [line["step"] for line in run.metrics("evaluation")] == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("staleness", [2, None])
async def test_o42_kill_of_an_asynchronous_run_loses_and_doubles_nothing(tmp_path: Path, staleness: int | None) -> None:
    settings = {"pipeline": {"max_staleness": staleness, "max_groups_in_flight": 6}, "trainer": {"save_freq": 3}}
    async with FakeRun(tmp_path, prompts=32, token_s=0.002, **settings) as run:
        for resume, step in ((False, 5), (True, 8)):
            process = await run.spawn(resume=resume)
            await run.until(lambda: run.updates and run.updates[-1].step >= step, f"step {step}")  # noqa: B023
            process.kill()
            await process.wait()
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=16, staleness=staleness)
        assert balance(run) == {"issued": 32, "trained": 32}
        rows = [row for step in run.rows_by_step().values() for row in step]
        assert sorted(rows) == sorted(f"train.parquet:{at}" for at in range(32)) or len(set(rows)) == 32
        assert not list((run.run_dir / "spool").iterdir())


async def test_an_interrupted_run_leaves_a_checkpoint_with_the_update_in_progress(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=16, token_s=0.001) as run:
        fault = run.trainer.faults.plan("slow", "Update", skip=2, delay=0.4)

        async def watch(job: Job) -> None:
            await run.until(lambda: fault.used, "the slow update")
            job.stop()
            job.stop()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 130
        assert len(run.updates) == 3
        assert run.trainer.saves == [str(run.run_dir / "checkpoints/trainer/global_step_3")]
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=8, staleness=1)


async def test_a_stop_while_a_push_is_running_never_gives_up_an_update(tmp_path: Path) -> None:
    """Between the stop and the end of the push a batch becomes ready: it must not begin an update."""
    async with FakeRun(tmp_path, prompts=32, token_s=0.001, pipeline={"max_staleness": 2}) as run:
        fault = run.engine.route_faults.plan("slow", "/finish_weight_update", skip=3, delay=0.3)
        run.trainer.faults.plan("slow", "Update", times=None, delay=0.05)

        async def watch(job: Job) -> None:
            await run.until(lambda: fault.used, "the slow push")
            job.stop()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 130
        assert run.manifest(len(run.updates))["policy_version"] == run.trainer.version
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=16, staleness=2)


async def test_a_stop_before_the_first_step_can_be_resumed(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.route_faults.plan("slow", "/pause", delay=0.3)

        async def watch(job: Job) -> None:
            await run.until(lambda: run.engine.calls("/pause"), "the first push")
            job.stop()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 130
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=2, staleness=1)


async def test_of_two_runners_of_one_run_the_second_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    """As where a command is killed and resumed at once, while its runner still finishes a step."""
    async with FakeRun(tmp_path, prompts=12, token_s=0.001, trainer={"update_timeout_s": 600.0}) as run:
        slow = run.trainer.faults.plan("hang", "Update", skip=2)
        first = await run.spawn()
        await run.until(lambda: slow.used, "an update that takes its time")
        second = await run.spawn(resume=True)
        assert await second.wait() == 2
        assert "is running in another process" in (run.run_dir / "runner.log").read_text()
        assert first.returncode is None
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        with hold(run.run_dir, RUNNER_LOCK):  # whatever ended it, its lock is gone with it
            assert not list(run.run_dir.glob("checkpoints/trainer/*"))


async def test_an_interrupt_ends_the_runner_with_130(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=40, token_s=0.005) as run:
        process = await run.spawn()
        await run.until(lambda: len(run.updates) >= 2, "two updates")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 130
        assert run.trainer.saves
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=20, staleness=1)


async def test_a_run_is_not_begun_twice_by_mistake(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        assert await run.run() == 0
        assert await run.run() == 2
        assert "holds a run already. Give --resume to go on with it" in run.error()
        assert await run.run(resume=True) == 0
        audit(run, steps=2, staleness=1)
        assert len(run.updates) == 2


@pytest.mark.parametrize("change", ["fewer rows", "more rows", "another seed"])
async def test_a_run_with_other_data_is_refused_and_goes_on_with_its_own(tmp_path: Path, change: str) -> None:
    data, job = tmp_path / "train.parquet", "job.yaml"
    async with FakeRun(tmp_path, prompts=12, trainer=TWO_EPOCHS, token_s=0.002) as run:
        assert await run.run(watch=stop_after(run, 4)) == 130
        kept, before = (data.read_bytes(), (run.run_dir / job).read_bytes()), balance(run)
        if change == "another seed":
            write_resolved(changed(run.spec, trainer={"seed": 7}), run.run_dir / job)
        else:
            write_parquet(data, rows(5 if change == "fewer rows" else 13))
        assert await run.run(resume=True) == 2
        assert "trainer.seed" in run.error()
        assert balance(run) == before
        data.write_bytes(kept[0])
        (run.run_dir / job).write_bytes(kept[1])
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}


async def test_groups_without_what_a_changed_job_needs_are_made_again(tmp_path: Path) -> None:
    """A job without a reference leaves scored groups behind, and goes on with one."""
    settings = {"pipeline": {"max_staleness": 4}, "algorithm": {"kl_coef": 0.0}}
    async with FakeRun(tmp_path, prompts=24, **settings) as run:
        run.trainer.faults.plan("slow", "Update", times=None, delay=0.2)
        assert await run.run(watch=stop_after(run, 2)) == 130
        left = balance(run)["ready"]
        assert left > 0
        run.spec = changed(run.spec, algorithm={"kl_coef": 0.1})
        write_resolved(run.spec, run.run_dir / "job.yaml")
        run.write_services()
        run.trainer.faults.clear()
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=12, staleness=4)
        assert balance(run) == {"issued": 24, "trained": 24}
        for update in final_updates(run)[3:]:
            assert all(sample.ref_logprobs is not None for sample in update.samples)


def changed(spec: JobSpec, **sections: dict[str, Any]) -> JobSpec:
    """The job with other settings."""
    values = spec.model_dump(mode="json")
    for section, fields in sections.items():
        values[section] |= fields
    return JobSpec.model_validate(values)


async def test_a_run_whose_database_is_gone_is_not_begun_again(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=16, token_s=0.002) as run:
        assert await run.run(watch=stop_after(run, 3)) == 130
        for path in run.run_dir.glob("state.db*"):
            path.unlink()
        assert await run.run(resume=True) == 2
        assert "the database knows 0 prompt groups of this run" in run.error()


@pytest.mark.parametrize(("keep", "left"), [(2, [5, 6]), (None, [1, 2, 3, 4, 5, 6])])
async def test_o43_rotation(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    settings = {"checkpoint": {"keep": keep}, "trainer": {"save_freq": 1}}
    async with FakeRun(tmp_path, prompts=12, **settings) as run:
        assert await run.run() == 0, run.error()
        for kind in ("trainer", "actor"):
            folders = (run.run_dir / "checkpoints" / kind).iterdir()
            assert sorted(int(folder.name.rsplit("_", 1)[-1]) for folder in folders) == left


async def test_o43_a_save_that_fails_leaves_the_earlier_ones(tmp_path: Path) -> None:
    settings = {"checkpoint": {"keep": 1}, "trainer": {"save_freq": 1}}
    async with FakeRun(tmp_path, prompts=12, **settings) as run:
        run.trainer.faults.plan("internal", "Save", times=1, skip=2)
        assert await run.run() == 1
        assert "Save failed (INTERNAL): planned failure: no space left on device" in run.error()
        assert [folder.name for folder in (run.run_dir / "checkpoints" / "trainer").iterdir()] == ["global_step_2"]
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=6, staleness=1)


async def test_o45_series_over_a_resume(tmp_path: Path) -> None:
    settings = {"trainer": {"test_freq": 2, "total_steps": 5}, "tracking": {"tensorboard": True}}
    async with FakeRun(tmp_path, prompts=12, test_prompts=3, **settings) as run:
        assert await run.run(watch=stop_after(run, 3)) == 130
        first = [line["step"] for line in run.metrics()]
        assert await run.run(resume=True) == 0, run.error()
        assert first == list(range(1, len(first) + 1))
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in run.metrics("evaluation")] == [0, 2, 4, 5]
        assert all(value is not None for line in run.metrics() for value in line["metrics"].values())


async def test_o45_a_crash_right_after_a_commit_drops_no_metrics(tmp_path: Path) -> None:
    settings = {"trainer": {"test_freq": 2, "save_freq": 2}}
    async with FakeRun(tmp_path, prompts=12, test_prompts=2, **settings) as run:
        hung = run.engine.route_faults.plan("hang", "/pause", times=1, skip=4)
        process = await run.spawn()
        await run.until(lambda: hung.used, "the push of step 4")
        assert len(run.trainer.saves) == 2
        process.kill()
        await process.wait()
        assert 4 not in {line["step"] for line in run.metrics()}
        assert await run.run(resume=True) == 0, run.error()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
        assert [line["step"] for line in run.metrics("evaluation")] == [0, 2, 4, 6]
