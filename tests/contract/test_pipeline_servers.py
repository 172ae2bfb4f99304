"""Rollout servers that leave a run, and come back to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import Request
from tests.fakes.run import FakeRun

LONG = {"max_response_length": 40, "flush_tokens": 4}
PLAN = [7 + at % 20 for at in range(40)]  # forty tokens, none of which ends a response


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.watcher._LOOK_S", 0.05)


def long_answers(run: FakeRun) -> None:
    for engine in run.engines:
        engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]


def leave(run: FakeRun, engine: FakeEngine) -> None:
    run.engines.remove(engine)
    run.write_services()


def running_there(engine: FakeEngine) -> list[Request]:
    return [request for request in engine.samples if not request.status and not request.disconnected]


async def test_a_server_that_leaves_gets_no_new_work_and_ends_what_it_has(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, servers=2, token_s=0.01, rollout=LONG) as run:
        long_answers(run)
        gone = run.engines[1]
        counted: list[int] = []

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2 and running_there(gone), "requests there")
            leave(run, gone)
            await run.until(lambda: any(event["state"] == "retired" for event in run.events("role")), "its retirement")
            counted.append(len(gone.samples))
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        run.engines.append(gone)
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert counted == [len(gone.samples)]
        assert all(request.status == 200 for request in gone.samples)  # nothing was broken off
        assert run.metrics()[-1]["metrics"]["rollout/servers"] == 1
        await gone.stop()


async def test_requests_of_a_server_that_leaves_and_ends_go_on_elsewhere(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, servers=2, token_s=0.01, rollout=LONG) as run:
        long_answers(run)
        gone = run.engines[1]

        async def watch(job: Job) -> None:
            await run.until(
                lambda: len(run.updates) >= 2 and any(r.sent >= 8 for r in running_there(gone)), "a part of a response"
            )
            leave(run, gone)
            await run.until(lambda: any(event["state"] == "retired" for event in run.events("role")), "its retirement")
            await gone.kill()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        run.engines.append(gone)
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert sum(line["metrics"]["rollout/kept_tokens"] for line in run.metrics()) >= 8
        for sample in (sample for update in run.updates for sample in update.samples):
            assert sample.response_ids.tolist() == PLAN


async def test_a_server_that_comes_back_unchanged_is_pushed_before_it_is_used(tmp_path: Path) -> None:
    """It missed updates meanwhile: that it was healthy when it left counts for nothing."""
    async with FakeRun(tmp_path, prompts=40, servers=2, token_s=0.006) as run:
        gone = run.engines[1]
        left_at: list[int] = []

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2 and gone.samples, "two updates")
            leave(run, gone)
            await run.until(lambda: len(run.updates) >= 6, "updates that it misses")
            left_at.append(len(gone.requests))
            run.engines.append(gone)
            run.write_services()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=20, staleness=1)
        later = [request.path.split("?")[0] for request in gone.requests[left_at[0] :]]
        drawn = next(at for at, path in enumerate(later) if path == "/nightshift/v1/generate")
        assert "/finish_weight_update" in later[:drawn]
        assert later[:drawn].count("/inference/v1/generate") >= 1  # the probe


async def test_a_run_that_all_servers_leave_waits_for_one_to_join(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.004) as run:
        first = run.engines[0]
        late = FakeEngine(first.store, "rollout-late", token_s=0.004, logs=first.logs)

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "two updates")
            leave(run, first)
            await asyncio.sleep(0.4)
            await late.start()
            run.engines.append(late)
            run.write_services()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        run.engines.append(first)
        audit(run, steps=6, staleness=1)
        assert late.samples
        assert all(request.version != "default" for request in late.samples)
        await first.stop()


async def test_a_run_that_all_servers_leave_for_good_says_so(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.004, pipeline={"role_timeout_s": 0.5}) as run:
        first = run.engines[0]

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 1, "an update")
            leave(run, first)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 1
        run.engines.append(first)
        assert "[rollout] no " in run.error()
        assert "none is listed" in run.error() or "all servers are away" in run.error()


async def test_a_push_that_one_server_delays_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.runner.fleet._LEAST_GRACE_S", 0.2)
    async with FakeRun(tmp_path, prompts=24, servers=2, token_s=0.002) as run:
        slow = run.engines[1]
        slow.route_faults.plan("slow", "/update_weights", times=1, skip=2, delay=2.0)
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert any("rollout-1 is left out until it holds the weights: it takes longer" in w for w in run.warnings())
        assert max(line["metrics"]["timing/sync"] for line in run.metrics()) < 1.5


async def test_a_server_of_somebody_else_that_is_started_again_is_prepared_and_pushed_again(tmp_path: Path) -> None:
    """Same address, token and entry: nobody says that it is another start."""
    async with FakeRun(tmp_path, prompts=16, token_s=0.004) as run:
        token = run.engine.token

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 3 and run.engine.running, "three updates")
            await run.engine.kill()
            await asyncio.sleep(0.2)
            await run.engine.start()
            run.engine.token = token
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=8, staleness=1)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert len(run.engine.calls("/init_weight_transfer_engine")) >= 2


@pytest.mark.parametrize("route", [True, False])
async def test_a_server_that_comes_back_under_its_address_with_another_model_draws_nothing(
    tmp_path: Path, route: bool
) -> None:
    """Address, token and start are those of before; it reports each push as done and computes with weights of its own.

    The audit would find its tokens: by its own log they were drawn with weights that were never published.
    """
    async with FakeRun(tmp_path, prompts=24, servers=2, token_s=0.003, route=route) as run:
        other = run.engines[0]

        async def watch(_job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 3, "step 3")
            start, token = other.incarnation, other.token
            await other.kill()
            await other.start()
            other.incarnation, other.token = start, token
            other.weights = np.roll(other.weights, 3)
            other.route_faults.plan("noop", "/update_weights", times=None)
            run.write_services()
            await run.until(lambda: False, "the end", 200)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        assert any("rollout-0 does not compute with the weights of" in text for text in run.warnings())
