"""Updates that begin before their batch is there: parts, failures below them, and groups that come too late."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from nightshift.wire.events import read_events
from nightshift.wire.experience import LossSpec
from nightshift.wire.schedule import read_schedule
from nightshift.wire.version import PolicyVersion
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance, final_updates
from tests.fakes.run import FakeRun

#: Steps of four groups of two samples, each of which fills a pass of the trainer.
SMALL: dict[str, Any] = {
    "rollout": {"batch_size": 4, "n": 2, "max_response_length": 4, "request_timeout_s": 10.0},
    "trainer": {"micro_batch_size": 2, "learning_rate": 2.0, "test_freq": 0, "update_timeout_s": 10.0},
}


def small(**changes: dict[str, Any]) -> dict[str, Any]:
    return {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {*SMALL, *changes}}


def slow_group(run: FakeRun, index: int, delay: float) -> None:
    run.engine.faults.plan("slow", f"g{index:07d}.", times=2, delay=delay)


def check_schedule(run: FakeRun) -> None:
    """What was recorded is what the trainer was given, in every step that leads to the final weights."""
    schedule = read_schedule(run.run_dir)
    updates = final_updates(run)
    assert [(record.step, record.version) for record in schedule.values()] == [(u.step, u.new) for u in updates]
    for record, update in zip(schedule.values(), updates, strict=True):
        given: dict[str, int] = {}
        for sample in update.samples:
            given[sample.group_id] = given.get(sample.group_id, 0) + 1
        assert [group for part in record.parts for group in part] == list(given)
        assert [sum(given[group] for group in part) for part in record.parts] == update.parts
        assert (record.attempt, record.expect) == (update.attempt, update.expect)
        assert record.learning_rate == update.learning_rate
        assert LossSpec(**record.loss) == update.loss
        for sample in update.samples:
            oldest, newest = record.versions[sample.group_id]
            steps = [PolicyVersion.parse(span.version).step for span in sample.versions]
            assert PolicyVersion.parse(oldest).step <= min(steps)
            assert PolicyVersion.parse(newest).step >= max(steps)


async def test_parts_are_trained_before_the_batch_is_there(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, **small(pipeline={"max_staleness": 0})) as run:
        slow_group(run, 1, 2.0)
        seen: list[int] = []

        def answered() -> int:
            return sum(request.answered for request in run.samples())

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.trainer.received) >= 1 and answered() >= 6, "a part, and three groups")
            seen.append(answered())
            seen.append(len(run.updates))
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=2, staleness=0)
        assert seen == [6, 0]  # three groups were answered and in the trainer, the fourth was not
        first = run.updates[0]
        assert len(first.parts) >= 2
        assert sum(first.parts) == 8
        assert [sample.group_id for sample in first.samples][-2:] == ["g0000001", "g0000001"]
        for update in run.updates:
            assert update.loss.total_tokens == sum(sample.trained_tokens for sample in update.samples)
            assert update.loss.total_sequences == len(update.samples)
        metrics = run.metrics()[0]["metrics"]
        assert metrics["update/parts"] == len(first.parts)
        assert metrics["samples"] == metrics["sequences"] == 8
        spans = [span for span in run.events("span") if span["name"] == "update_part"]
        steps = [span for span in run.events("span") if span["name"] == "optimizer_step"]
        assert len(spans) == sum(len(update.parts) - 1 for update in run.updates)
        assert all(span["links"] for span in spans)
        assert [len(span["links"]) for span in steps] == [4, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": {"streaming": False}},
        {"pipeline": {"deterministic": True, "max_staleness": 0}},
        {"algorithm": {"estimator": "reinforce_plus_plus", "kl_coef": 0.0}},
        {"algorithm": {"whiten_advantages": True}},
    ],
)
async def test_a_batch_that_must_be_whole_comes_in_one_part(tmp_path: Path, changes: dict[str, Any]) -> None:
    async with FakeRun(tmp_path, prompts=8, **small(**changes)) as run:
        slow_group(run, 1, 0.2)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert [update.parts for update in run.updates] == [[8], [8]]


async def test_parts_fill_the_passes_of_the_trainer(tmp_path: Path) -> None:
    changes = {"trainer": {"micro_batch_size": 4}, "rollout": {"batch_size": 5}}
    async with FakeRun(tmp_path, prompts=20, token_s=0.001, **small(**changes)) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        for update in run.updates:
            assert all(part % 4 == 0 for part in update.parts[:-1])
            assert sum(update.parts) == 10


@pytest.mark.parametrize("staleness", [0, 1, 2, None])
async def test_any_bound_holds_with_parts(tmp_path: Path, staleness: int | None) -> None:
    changes = {"pipeline": {"max_staleness": staleness, "max_groups_in_flight": 10}}
    async with FakeRun(tmp_path, prompts=40, **small(**changes)) as run:
        run.engine.faults.plan("slow", times=None, delay=0.06, when=lambda request: request.order % 7 == 0)
        assert await run.run() == 0, run.error()
        audit(run, steps=10, staleness=staleness)
        check_schedule(run)
        assert balance(run) == {"issued": 40, "trained": 40}
        assert max(len(update.parts) for update in run.updates) > 1


async def test_a_straggler_holds_up_nothing_that_is_ready(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, **small(pipeline={"max_staleness": 2})) as run:
        slow_group(run, 0, 4.0)
        times: list[float] = []

        async def watch(job: Job) -> None:
            for step in (1, 2):
                await run.until(lambda: len(run.updates) >= step, f"step {step}")  # noqa: B023
                times.append(time.monotonic())
            await run.until(lambda: sum(run.updates[-1].parts) == 8 and len(run.trainer.received) > 2, "parts")
            # The third step trains what there is of its groups, and the straggler's place stays free.
            await run.until(lambda: sum(key[0] == 3 for key in run.trainer.received) >= 1, "a part of step 3")
            slow = [request for request in run.samples() if ".g0000000." in request.request_id]
            times.append(0.0 if any(request.answered for request in slow) else 1.0)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=3, staleness=2)
        assert times[-1] == 1.0
        assert "g0000000" in {sample.group_id for sample in run.updates[2].samples}


# Failures -------------------------------------------------------------------------------------------------------------


async def test_a_trainer_that_fails_below_a_part_loses_and_repeats_nothing(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, **small(pipeline={"max_staleness": 0})) as run:
        slow_group(run, 1, 0.3)
        run.trainer.faults.plan("internal", "Update", skip=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=3, staleness=0)
        assert balance(run) == {"issued": 12, "trained": 12}
        assert run.trainer.abandoned == [(1, 0)]
        assert [update.attempt for update in run.updates] == [1, 0, 0]
        assert all(len({sample.sample_id for sample in update.samples}) == 8 for update in run.updates)
        assert run.metrics()[0]["metrics"]["update/attempts"] == 2
        check_schedule(run)
        assert any("step 1 is tried again from its first group, attempt 1" in text for text in run.warnings())


async def test_a_lost_answer_to_a_part_is_asked_for_again(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, **small(pipeline={"max_staleness": 0})) as run:
        slow_group(run, 1, 0.3)
        run.trainer.faults.plan("lose_answer", "Update", times=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=0)
        assert run.trainer.repeated == 1
        assert run.trainer.abandoned == []
        assert {update.attempt for update in run.updates} == {0}


async def test_a_trainer_that_forgot_the_parts_gets_them_again(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, **small(pipeline={"max_staleness": 0})) as run:
        slow_group(run, 1, 0.3)

        async def watch(job: Job) -> None:
            await run.until(lambda: run.trainer.received, "a part")
            run.trainer._abandon()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=2, staleness=0)
        assert run.updates[0].attempt == 1


async def test_attempts_come_to_an_end(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, **small(pipeline={"retries": 2})) as run:
        run.trainer.faults.plan("internal", "Update", times=None)
        assert await run.run() == 1
        assert "[trainer] Update failed (INTERNAL): planned failure" in run.error()
        assert len(run.warnings()) == 2
        assert run.updates == []


async def test_a_stop_below_an_open_step_leaves_its_groups_to_the_resumed_run(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, **small(pipeline={"max_staleness": 1})) as run:
        slow_group(run, 5, 5.0)

        async def watch(job: Job) -> None:
            await run.until(lambda: (2, 0, 0) in run.trainer.received, "a part of step 2")
            job.stop()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 130
        assert len(run.updates) == 1
        assert run.manifest(1)["policy_version"] == run.trainer.version
        run.engine.faults.clear()
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=3, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


async def test_o42_a_kill_below_an_open_step_loses_and_doubles_nothing(tmp_path: Path) -> None:
    changes = {"pipeline": {"max_staleness": 1}, "trainer": {"save_freq": 2}}
    async with FakeRun(tmp_path, prompts=24, **small(**changes)) as run:
        hung = run.engine.faults.plan("hang", "g0000013.", times=2)
        process = await run.spawn()
        await run.until(
            lambda: hung.used and run.trainer._open is not None and run.trainer._open.step >= 4, "a part", 40.0
        )
        process.kill()
        await process.wait()
        assert run.updates[-1].step >= 3
        assert await run.run(resume=True, limit_s=60.0) == 0, run.error()
        audit(run, steps=6, staleness=1)
        check_schedule(run)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert not list((run.run_dir / "spool").iterdir())


async def test_a_trainer_that_dies_below_a_part_is_made_up_for_from_the_last_checkpoint(tmp_path: Path) -> None:
    changes = {"pipeline": {"max_staleness": 1}, "trainer": {"save_freq": 2}}
    async with FakeRun(tmp_path, prompts=24, **small(**changes)) as run:
        slow_group(run, 13, 0.5)

        async def watch(job: Job) -> None:
            await run.until(lambda: run.trainer._open is not None and run.trainer._open.step >= 4, "an open step", 40.0)
            await run.trainer.die()
            await run.trainer.start_again()
            run.write_services()
            await asyncio.Event().wait()

        assert await run.run(watch=watch, limit_s=60.0) == 0, run.error()
        audit(run, steps=6, staleness=1)
        check_schedule(run)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert run.manifest(6)["lineage"] == 1


# Too old --------------------------------------------------------------------------------------------------------------


async def test_groups_that_run_too_long_are_cancelled_and_counted(tmp_path: Path) -> None:
    changes = {"pipeline": {"max_staleness": 1, "on_stale": "drop"}, "trainer": {"total_steps": 5}}
    async with FakeRun(tmp_path, prompts=24, **small(**changes)) as run:
        run.engine.faults.plan("hang", "g0000002.", times=None)
        assert await run.run() == 0, run.error()
        audit(run, steps=5, staleness=1)
        counts = balance(run)
        assert counts["trained"] == 20
        assert counts["dropped_stale"] >= 1
        assert counts["issued"] == 20 + counts["dropped_stale"]
        hung = [request for request in run.samples() if ".g0000002." in request.request_id]
        assert len(hung) == 2
        assert all(request.disconnected and not request.answered for request in hung)
        dropped = [line["metrics"]["staleness/dropped_groups"] for line in run.metrics()]
        assert sum(dropped) == counts["dropped_stale"]
        events = list(read_events(run.run_dir / "events.jsonl"))
        (root,) = [e for e in events if e["kind"] == "span" and e["attributes"].get("rl.dropped") == "stale"]
        assert root["attributes"]["group_id"] == "g0000002"


async def test_a_dropped_group_makes_room_for_another(tmp_path: Path) -> None:
    changes = {"pipeline": {"max_staleness": 1, "on_stale": "drop"}, "rollout": {"batch_size": 1}}
    async with FakeRun(
        tmp_path,
        prompts=12,
        **small(**changes),
    ) as run:
        run.engine.faults.plan("hang", times=None, when=lambda request: request.request_id.split(".")[-3] == "g0000001")
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 13, "trained": 12, "dropped_stale": 1}
