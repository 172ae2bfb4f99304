"""The number of groups in flight follows the servers' own metrics."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from orchestrator.runner.books import Books
from orchestrator.runner.fleet import Fleet
from orchestrator.runner.job import Job
from orchestrator.store.state import StateStore
from tests.fakes.audit import audit, balance
from tests.fakes.run import FakeRun

WIDE = {"max_staleness": 8}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.watcher._LOOK_S", 0.05)
    monkeypatch.setattr("orchestrator.runner.watcher._LOAD_S", 0.05)


async def longest_queue(run: FakeRun, after_steps: int) -> int:
    """Runs to the end; the longest queue that was seen once so many steps had been made."""
    longest = 0

    async def watch(job: Job) -> None:
        nonlocal longest
        await run.until(lambda: len(run.updates) >= after_steps, "the windows to settle")
        while True:
            longest = max(longest, run.engine.waiting)
            await asyncio.sleep(0.01)

    assert await run.run(watch=watch) == 0, run.error()
    return longest


@pytest.mark.parametrize("refill", ["adaptive", "fixed"])
async def test_a_queue_that_only_makes_samples_older_is_not_built(tmp_path: Path, refill: str) -> None:
    """Four slots, and a staleness bound that would let 36 requests wait for them."""
    settings = {"pipeline": WIDE, "rollout": {"refill": refill}}
    async with FakeRun(tmp_path, prompts=60, token_s=0.01 if refill == "adaptive" else 0.03, **settings) as run:
        run.engine.slots = 4
        await run.engine.kill()
        await run.engine.start()
        run.write_services()
        # The window settles in some steps; without one the queue is there from the first moment, before the run's own
        # pace counts.
        longest = await longest_queue(run, after_steps=8 if refill == "adaptive" else 0)
        audit(run, steps=30, staleness=8)
        assert balance(run) == {"issued": 60, "trained": 60}
        metrics = [line["metrics"] for line in run.metrics()]
        if refill == "adaptive":
            assert longest <= 12
            assert min(line.get("refill/limit_groups", 99) for line in metrics) <= 6
        else:
            assert longest >= 20
            assert not any("refill/limit_groups" in line for line in metrics)
        assert any(line.get("refill/running", 0) > 0 for line in metrics)


async def test_a_limit_below_the_batch_ends_no_run(tmp_path: Path) -> None:
    """One slot: the window falls to one group, while each step needs four."""
    settings = {"pipeline": {"max_staleness": 2}, "rollout": {"batch_size": 4}}
    async with FakeRun(tmp_path, prompts=24, token_s=0.002, **settings) as run:
        run.engine.slots = 1
        await run.engine.kill()
        await run.engine.start()
        run.write_services()
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=2)
        assert balance(run) == {"issued": 24, "trained": 24}


async def test_a_server_without_congestion_is_never_held_back(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, token_s=0.005, pipeline=WIDE) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=8)
        assert not any("refill/limit_groups" in line["metrics"] for line in run.metrics())


async def test_groups_that_would_start_while_a_commit_is_written_are_not_ahead_in_its_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load falls while the ledger is closed for a commit, so that further groups could start just then."""
    flush, committing = Books.flush, False

    async def slow_flush(books: Books) -> None:
        nonlocal committing
        committing = True
        try:
            await flush(books)
        finally:
            committing = False

    monkeypatch.setattr(Books, "flush", slow_flush)
    monkeypatch.setattr(StateStore, "check_fence", lambda store, run_id: time.sleep(0.2))
    monkeypatch.setattr(Fleet, "room", lambda fleet, groups: 1000 if committing else 0)

    async def tell_of_room(job: Job) -> None:
        while True:
            if committing and job.pipeline is not None:
                await job.pipeline._notify()
            await asyncio.sleep(0.01)

    async with FakeRun(tmp_path, prompts=24, token_s=0.01, pipeline=WIDE, trainer={"save_freq": 1}) as run:
        assert await run.run(watch=tell_of_room) == 0, run.error()
        audit(run, steps=12, staleness=8)
        commits = sorted((run.run_dir / "checkpoints" / "manifests").glob("*.json"))
        assert len(commits) == 12
        for manifest in (json.loads(path.read_text()) for path in commits):
            assert manifest["cursor"]["epoch"] * 24 + manifest["cursor"]["offset"] == manifest["issued"]
