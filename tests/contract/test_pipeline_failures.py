"""Requests, scorers, trainer and database that fail for a while, or for good."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from nightshift.wire.experience import Sample
from orchestrator.runner.job import Job
from orchestrator.runner.spool import Spool
from tests.fakes.audit import audit, balance
from tests.fakes.requests import Request
from tests.fakes.run import FakeRun


def attempts(run: FakeRun, sample: str) -> list[Request]:
    return [request for request in run.samples() if f".{sample}." in request.request_id]


# Requests to servers --------------------------------------------------------------------------------------------------


async def test_o39_each_group_holds_distinct_slots(tmp_path: Path) -> None:
    """One request meets a 503, one is answered after the client's time-out, one is refused, one is fine."""
    settings = {"rollout": {"n": 4, "batch_size": 1, "request_timeout_s": 1.5}}
    settings["pipeline"] = {"max_staleness": 0}
    async with FakeRun(tmp_path, prompts=2, **settings) as run:
        run.engine.faults.plan("503", "g0000000.0")
        run.engine.faults.plan("late", "g0000000.1", delay=3.0)
        run.engine.faults.plan("400", "g0000000.2")
        assert await run.run() == 0, run.error()
        await asyncio.sleep(2.0)
        audit(run, steps=2, staleness=0)
        first = run.updates[0].samples
        assert [sample.sample_id for sample in first] == ["g0000000.0", "g0000000.1", "g0000000.3"]
        assert [request.status for request in attempts(run, "g0000000.0")] == [503, 200]
        late, again = attempts(run, "g0000000.1")
        assert late.tokens != first[1].response_ids.tolist() == again.tokens
        assert not late.answered
        assert [request.status for request in attempts(run, "g0000000.2")] == [400]
        ids = [request.request_id for request in run.samples()]
        assert len(set(ids)) == len(ids)
        assert run.metrics()[0]["metrics"]["rollout/failed_samples"] == 1


async def test_o39_attempts_grow_apart(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=2) as run:
        run.engine.faults.plan("503", "g0000000.0", times=3)
        assert await run.run() == 0, run.error()
        times = [request.time for request in attempts(run, "g0000000.0")]
        assert len(times) == 4
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert pauses[0] >= 0.09
        assert pauses[1] >= 0.19


@pytest.mark.parametrize("fault", ["drop", "abort", "not_json", "503"])
async def test_o38a_a_request_that_fails_is_made_again(tmp_path: Path, fault: str) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.engine.faults.plan(fault, times=1, skip=3)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 8, "trained": 8}


async def test_o38a_refused_prompts_are_refilled_and_counted(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, trainer={"total_steps": 4}) as run:
        run.engine.faults.plan("400", "g0000003", times=None)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 9, "trained": 8, "failed": 1}
        assert any("g0000003 has no usable sample" in text and "planned 400" in text for text in run.warnings())


async def test_o38a_a_run_in_which_every_request_is_refused_ends_soon(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12) as run:
        run.engine.faults.plan("400", times=None)
        began = time.monotonic()
        assert await run.run() == 1
        assert time.monotonic() - began < 30
        assert "[rollout] group g0000000 has no usable sample" in run.error()
        assert "planned 400" in run.error()


async def test_whole_groups_that_fail_count_against_the_budget(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=40, pipeline={"failure_budget": 0.3}, rollout={"batch_size": 4}) as run:
        run.engine.faults.plan("400", times=None, when=lambda r: int(r.request_id.split(".")[-3][1:]) % 2 == 1)
        assert await run.run() == 1
        assert "prompt groups failed, the first because group g0000001" in run.error()


async def test_o38b_a_request_that_never_returns_meets_its_deadline(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, rollout={"request_timeout_s": 0.4}) as run:
        run.engine.faults.plan("hang", "g0000001.0")
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        hung, again = attempts(run, "g0000001.0")
        assert hung.disconnected
        assert again.answered


async def test_o38b_a_server_that_hangs_for_good_is_named(tmp_path: Path) -> None:
    settings = {"rollout": {"request_timeout_s": 0.2}, "pipeline": {"role_timeout_s": 1.0}}
    async with FakeRun(tmp_path, prompts=8, **settings) as run:
        run.engine.faults.plan("hang", times=None)
        assert await run.run() == 1
        assert "[rollout]" in run.error()
        assert "rollout-0 did not answer /nightshift/v1/generate within 0.2 s" in run.error()


async def test_o38c_a_server_that_is_gone_for_good_is_named(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=40, token_s=0.005, pipeline={"role_timeout_s": 1.0}) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "two updates")
            await run.engine.kill()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 1
        assert "[rollout]" in run.error()
        assert re.search(r"(for|within) 1 s", run.error())
        assert f"rollout-0 at {run.engine.address['url']} " in run.error()
        # Whoever asks first: a request, or the look at its health.
        assert re.search(r"is away|does not answer its health check", run.error())


# Scorers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("application", ["reward", "reference"])
@pytest.mark.parametrize("fault", ["unavailable", "internal"])
async def test_a_scorer_that_is_away_for_a_moment_is_asked_again(tmp_path: Path, application: str, fault: str) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.scorers.faults.plan(fault, application, times=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 8, "trained": 8}


async def test_a_scorer_that_restarts_delays_the_run(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.005) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 1, "an update")
            await run.scorers.stop()
            await asyncio.sleep(0.5)
            await run.scorers.start()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 8, "trained": 8}


async def test_a_scorer_that_stays_away_is_named(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"role_timeout_s": 0.8}) as run:
        run.scorers.faults.plan("unavailable", "reference", times=None)
        assert await run.run() == 1
        assert "[reference]" in run.error()
        assert "was away for 0.8 s" in run.error()
        assert "planned absence" in run.error()


async def test_a_scorer_that_never_answers_meets_its_deadline(tmp_path: Path) -> None:
    settings = {"scorers": {"timeout_s": 0.3}, "pipeline": {"role_timeout_s": 1.5}}
    async with FakeRun(tmp_path, prompts=8, **settings) as run:
        run.scorers.faults.plan("hang", "reference", times=None)
        assert await run.run() == 1
        assert re.search(r"did not answer within 0.3 s, asked \d times", run.error())
        assert "[reference]" in run.error()


async def test_calls_that_a_replaced_scorer_never_answered_are_made_again(tmp_path: Path) -> None:
    """A large model may take longer to be there again than one call has."""
    settings = {"scorers": {"timeout_s": 1.0}, "pipeline": {"role_timeout_s": 120.0}}
    async with FakeRun(tmp_path, prompts=8, **settings) as run:
        run.scorers.faults.plan("hang", "reference", times=3)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 8, "trained": 8}


async def test_calls_to_scorers_are_batched(tmp_path: Path) -> None:
    settings = {"scorers": {"batch_samples": 6, "batch_wait_ms": 50.0}, "pipeline": {"max_staleness": 2}}
    async with FakeRun(tmp_path, prompts=12, **settings) as run:
        assert await run.run() == 0, run.error()
        sizes = Counter(len(call.samples) for call in run.scorers.calls if call.application == "reference")
        assert max(sizes) == 6
        names = [name for call in run.scorers.calls if call.application == "reference" for name in call.sample_ids]
        assert len(names) == len(set(names)) == 24


# Trainer --------------------------------------------------------------------------------------------------------------


async def test_a_lost_answer_of_the_trainer_applies_nothing_twice(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.trainer.faults.plan("lose_answer", "Update", times=1, skip=1)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert run.trainer.repeated == 1


@pytest.mark.parametrize("method", ["Update", "Publish", "Save"])
async def test_a_trainer_that_fails_is_named(tmp_path: Path, method: str) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        run.trainer.faults.plan("internal", method, times=None, skip=1 if method == "Publish" else 0)
        assert await run.run() == 1
        assert f"[trainer] {method} failed (INTERNAL): planned failure: no space left on device" in run.error()


async def test_a_trainer_that_hangs_meets_the_deadline_of_an_update(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, trainer={"update_timeout_s": 0.5}) as run:
        run.trainer.faults.plan("hang", "Update")
        assert await run.run() == 1
        assert "[trainer] Update took longer than 0.5 s" in run.error()


async def test_a_trainer_with_other_weights_is_not_trained_on(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.01) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 1, "an update")
            run.trainer.version = "somebody/0/7"
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 1
        assert "[trainer]" in run.error()
        assert "refused: holds 'somebody/0/7'" in run.error()


async def test_a_missing_reference_of_another_vocabulary_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tests.fakes.scorers.VOCAB_SIZE", 63)
    async with FakeRun(tmp_path, prompts=8) as run:
        assert await run.run() == 1
        assert "the reference has 63 tokens, the policy 64" in run.error()


# Database and addresses -----------------------------------------------------------------------------------------------


async def test_while_the_database_is_away_nothing_starts_and_nothing_is_lost(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.01) as run:
        seen: list[int] = []

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "two updates")
            lock = sqlite3.connect(run.run_dir / "state.db", isolation_level=None)
            lock.execute("BEGIN EXCLUSIVE")
            await run.until(lambda: run.engine.running == 0, "what was under way to end")
            await asyncio.sleep(0.4)
            seen.append(len(run.samples()))
            await asyncio.sleep(0.6)
            seen.append(len(run.samples()))
            lock.execute("COMMIT")
            lock.close()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert seen[0] == seen[1] < 24
        assert balance(run) == {"issued": 12, "trained": 12}


async def test_a_database_that_refuses_for_a_while_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy.exc import OperationalError

    from orchestrator.store.state import StateStore

    save, failures = StateStore.save_groups, iter(range(3))

    def failing(self: StateStore, run_id: str, records: list[object]) -> None:
        if next(failures, None) is not None:
            raise OperationalError("insert", {}, Exception("server closed the connection"))
        save(self, run_id, records)  # type: ignore[arg-type]

    monkeypatch.setattr(StateStore, "save_groups", failing)
    async with FakeRun(tmp_path, prompts=4) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert run.warnings().count("database away, waiting: server closed the connection") == 3


async def test_a_full_disk_ends_the_run_by_name_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, left = Spool.put, iter(range(5))

    def full(spool: Spool, index: int, samples: list[Sample]) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(spool, index, samples)

    async with FakeRun(tmp_path, prompts=12) as run:
        monkeypatch.setattr(Spool, "put", full)
        assert await run.run() == 1
        assert "found no room on the disk" in run.error()
        monkeypatch.setattr(Spool, "put", put)
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


async def test_services_that_never_come_up_are_named(tmp_path: Path) -> None:
    settings = {
        "rollout": {"start_timeout_s": 0.1},
        "scorers": {"start_timeout_s": 0.1},
        "trainer": {"start_timeout_s": 0.1},
    }
    async with FakeRun(tmp_path, prompts=4, **settings) as run:
        (run.run_dir / "services.json").unlink()
        assert await run.run() == 1
        assert "[agent] the services of the run did not come up within 0.3 s" in run.error()


async def test_an_error_that_nobody_foresaw_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("orchestrator.runner.update.compute_advantages", broken)
    async with FakeRun(tmp_path, prompts=4) as run:
        assert await run.run() == 1
        assert run.error() == "[orchestrator] ZeroDivisionError: a bug"
