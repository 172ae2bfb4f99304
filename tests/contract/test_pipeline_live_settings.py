"""Settings that change while a run goes on: at a stated step, told as events, and still in force after a restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nightshift.wire.settings_file import ASKED, asked_for, in_force, write_settings
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.run import FakeRun


def ask(run: FakeRun, **changes: Any) -> None:
    """Writes what the service writes."""
    write_settings(
        run.run_dir / ASKED, asked_for(run.run_dir) | {key.replace("__", "."): v for key, v in changes.items()}
    )


def after(run: FakeRun, step: int, **changes: Any):
    """Asks for changes once ``step`` was made."""

    async def watch(_job: Job) -> None:
        await run.until(lambda: len(run.updates) >= step, f"step {step}", 60)
        ask(run, **changes)
        await run.until(lambda: False, "the end", 200)

    return watch


def effects(run: FakeRun) -> dict[str, tuple[Any, Any, int]]:
    return {event["key"]: (event["old"], event["new"], event["step"]) for event in run.events("setting")}


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_batch_size_and_learning_rate(tmp_path: Path, staleness: int) -> None:
    settings = {"pipeline": {"max_staleness": staleness}, "trainer": {"total_steps": 8}}
    async with FakeRun(tmp_path, prompts=12, token_s=0.003, **settings) as run:
        changes = {"rollout__batch_size": 3, "trainer__learning_rate": 0.5, "trainer__save_freq": 2}
        assert await run.run(watch=after(run, 2, **changes), limit_s=120) == 0, run.error()
        old, new, step = effects(run)["rollout.batch_size"]
        assert (old, new) == (2, 3)
        assert 3 <= step <= 5
        for update in run.updates:
            assert len(update.samples) == (4 if update.step < step else 6)
            assert update.learning_rate == (2.0 if update.step < step else 0.5)
        assert balance(run)["issued"] == balance(run)["trained"] + balance(run).get("in_flight", 0)
        assert in_force(run.run_dir) == {"rollout.batch_size": 3, "trainer.learning_rate": 0.5, "trainer.save_freq": 2}
        ages = [line["metrics"]["staleness/max"] for line in run.metrics()]
        assert max(ages) <= staleness


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
async def test_batches_that_grow_and_shrink_beside_filters_drops_and_failures(tmp_path: Path, on_stale: str) -> None:
    """Each step has the batch that was in force, and each group one end, whatever leaves the run meanwhile."""
    algorithm = {"filter_zero_spread": True, "kl_coef": 0.01}
    settings = {"pipeline": {"max_staleness": 1, "on_stale": on_stale}, "trainer": {"total_steps": 12}}
    async with FakeRun(tmp_path, prompts=40, token_s=0.002, algorithm=algorithm, **settings) as run:

        def group(name: str) -> int:
            return int(re.search(r"g(\d{7})", name)[1])  # type: ignore[index]

        run.scorers.reward = lambda sample: float(sample["id"][-1]) if group(sample["id"]) % 3 else 0.0
        run.engine.faults.plan("400", times=None, when=lambda request: group(request.request_id) % 7 == 5)
        run.engine.faults.plan("slow", times=None, delay=0.2, when=lambda request: group(request.request_id) % 5 == 1)

        async def watch(_job: Job) -> None:
            for step, size in ((2, 4), (4, 1), (6, 3), (8, 2)):
                await run.until(lambda: len(run.updates) >= step, f"step {step}")  # noqa: B023
                ask(run, rollout__batch_size=size)
            await run.until(lambda: False, "the end", 200)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=12, staleness=1)
        changes = [(event["step"], event["new"]) for event in run.events("setting")]
        assert [size for _, size in changes] == [4, 1, 3, 2]
        for update in run.updates:
            size = [2, *(new for step, new in changes if step <= update.step)][-1]
            assert len({sample.group_id for sample in update.samples}) == size
        counts = balance(run)
        assert counts["dropped_filtered"] > 0
        assert counts["failed"] > 0
        assert counts["issued"] == sum(count for end, count in counts.items() if end != "issued")


async def test_asynchronous_to_synchronous_and_back(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 2}, "trainer": {"total_steps": 12}}
    async with FakeRun(tmp_path, prompts=12, token_s=0.003, **settings) as run:

        async def watch(_job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 3, "step 3", 60)
            ask(run, pipeline__max_staleness=0)
            await run.until(lambda: len(run.updates) >= 8, "step 8", 60)
            ask(run, pipeline__max_staleness=1)
            await run.until(lambda: False, "the end", 200)

        assert await run.run(watch=watch, limit_s=120) == 0, run.error()
        first, second = [event["step"] for event in run.events("setting")]
        ages = {line["step"]: line["metrics"]["staleness/max"] for line in run.metrics()}
        assert max(ages[step] for step in range(first, second)) == 0
        assert max(ages[step] for step in range(second, 13)) <= 1


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_temperature_changes_only_between_groups(tmp_path: Path, staleness: int) -> None:
    """What was drawn at one temperature is trained on at that one."""
    settings = {"pipeline": {"max_staleness": staleness}, "trainer": {"total_steps": 8}}
    async with FakeRun(tmp_path, prompts=24, token_s=0.003, **settings) as run:
        assert await run.run(watch=after(run, 2, rollout__temperature=0.5), limit_s=120) == 0, run.error()
        old, new, step = effects(run)["rollout.temperature"]
        assert (old, new) == (1.0, 0.5)
        names = [re.search(r"g\d+\.\d+", request.request_id) for request in run.samples()]
        drawn = {
            name[0]: request.body["temperature"] for name, request in zip(names, run.samples(), strict=True) if name
        }
        for update in run.updates:
            expected = 1.0 if update.step < step else 0.5
            assert update.loss.temperature == expected
            assert {drawn[sample.sample_id] for sample in update.samples} == {expected}
        assert [event["step"] for event in run.events("checkpoint")] == [step - 1, 8]
        assert balance(run) == {"issued": 16, "trained": 16}


async def test_settings_survive_a_restart(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, trainer={"total_steps": 8, "save_freq": 1}, token_s=0.003) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "step 2", 60)
            ask(run, rollout__batch_size=3)
            await run.until(lambda: bool(run.events("setting")), "the change", 60)
            job.stop()
            await run.until(lambda: False, "the end", 200)

        assert await run.run(watch=watch, limit_s=120) == 130
        made = len(run.updates)
        ask(run, trainer__learning_rate=0.25)
        assert await run.run(resume=True) == 0, run.error()
        later = run.updates[made:]
        assert {len(update.samples) for update in later} == {6}
        assert {update.learning_rate for update in later} == {0.25}
        assert len(run.events("setting")) == 2, "what was in force already is not told again"


async def test_what_cannot_be_is_told_and_changes_nothing(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, trainer={"total_steps": 4}) as run:
        ask(run, trainer__learning_rate=-1.0, rollout__batch_size="many", model__path="other")
        assert await run.run() == 0, run.error()
        assert run.events("setting") == []
        assert sum("is refused" in text for text in run.warnings()) == 2
        assert {update.learning_rate for update in run.updates} == {2.0}


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [("rollout__batch_size", 10**7, "buffer_mib"), ("algorithm__kl_coef", 0.1, "without a reference")],
)
async def test_a_setting_that_the_whole_job_cannot_take_is_refused_though_its_section_could(
    tmp_path: Path, key: str, value: Any, cause: str
) -> None:
    algorithm = {"kl_coef": 0.0}
    async with FakeRun(tmp_path, prompts=8, algorithm=algorithm, trainer={"total_steps": 4}) as run:
        ask(run, **{key: value, "trainer__learning_rate": 0.25})
        assert await run.run() == 0, run.error()
        assert [text for text in run.warnings() if "is refused" in text and cause in text]
        assert set(effects(run)) == {"trainer.learning_rate"}
        audit(run, steps=4, staleness=1)
