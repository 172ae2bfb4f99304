"""Servers that hang without dying: their requests go on elsewhere, and another start of them is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nightshift.wire.restart_request import take_restart
from orchestrator.runner.engine import Engine
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.run import FakeRun

LONG = {"max_response_length": 40, "flush_tokens": 4, "stall_timeout_s": 0.6, "request_timeout_s": 30.0}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.watcher._LOOK_S", 0.05)
    monkeypatch.setattr("orchestrator.runner.watcher._LOAD_S", 0.1)
    monkeypatch.setitem(Engine._call.__kwdefaults__, "timeout_s", 1.5)
    monkeypatch.setattr("orchestrator.runner.engine._ADMIN_TIMEOUT_S", 1.5)


async def agent(run: FakeRun, causes: list[str]) -> None:
    """Starts servers again when the runner asks for it, as the agent does."""
    while True:
        for engine in run.engines:
            cause = take_restart(run.run_dir, engine.name, engine.incarnation)
            if cause is not None:
                causes.append(cause)
                await run.restart(engine, 0.2)
        await asyncio.sleep(0.05)


def kept_tokens(run: FakeRun) -> float:
    return sum(line["metrics"]["rollout/kept_tokens"] for line in run.metrics())


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("how", ["frozen", "silent"])
async def test_a_server_that_hangs_is_started_again_and_its_requests_go_on(
    tmp_path: Path, servers: int, how: str
) -> None:
    """Its engine stands still, or its API server does too; what it had sent of its responses is kept."""
    async with FakeRun(tmp_path, prompts=24, servers=servers, token_s=0.01, rollout=LONG) as run:
        for engine in run.engines:
            engine.managed = True
        run.write_services()
        causes: list[str] = []

        async def watch(job: Job) -> None:
            victim = run.engines[-1]
            await run.until(
                lambda: len(run.updates) >= 3 and any(r.sent >= 8 for r in victim.samples if not r.status),
                "responses that are partly sent",
            )
            setattr(victim, how, True)
            await agent(run, causes)

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        (cause,) = causes
        # Whichever comes first: the requests that do not get on, or the next push.
        assert "drew no token for" in cause or "did not answer /" in cause
        assert run.engines[-1].starts == 3
        again = [request for request in run.engines[-1].samples if request.version != "default"]
        assert again
        assert kept_tokens(run) > 0
        states = [event["state"] for event in run.events("role") if event["role"] == "rollout"]
        assert "suspect" in states
        assert any("holds" in event["detail"] for event in run.events("role") if event["state"] == "ready")


async def test_a_push_to_a_server_that_hangs_asks_for_another_start(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, pipeline={"max_staleness": 0}) as run:
        run.engine.managed = True
        run.write_services()
        run.engine.route_faults.plan("hang", "/update_weights", times=1, skip=1)
        causes: list[str] = []
        assert await run.run(watch=lambda job: agent(run, causes)) == 0, run.error()
        audit(run, steps=6, staleness=0)
        assert causes == ["rollout-0 did not answer /update_weights within 1.5 s"]
        assert run.engine.starts == 3


async def test_a_server_of_somebody_else_that_hangs_gets_no_work_until_it_gets_on(tmp_path: Path) -> None:
    """Nobody can be asked to start it again: it is tried after a pause, and pushed before it is used."""
    async with FakeRun(tmp_path, prompts=30, servers=2, token_s=0.01, rollout=LONG) as run:
        victim: FakeEngine = run.engines[1]

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2 and victim.running, "requests on both")
            victim.frozen = True
            await run.until(
                lambda: any("drew no token" in event["detail"] for event in run.events("role")),
                "the hang to be noticed",
            )
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=15, staleness=1)
        assert balance(run) == {"issued": 30, "trained": 30}
        assert not list(run.run_dir.glob("restart-*"))
        assert not any(request.status == 200 for request in victim.samples if request.disconnected)


async def test_a_server_without_metrics_is_not_taken_for_one_that_hangs(tmp_path: Path) -> None:
    """Another proxy may stand before it. What it has to do takes longer than the limit, and it is left alone."""
    settings = {"rollout": LONG | {"stall_timeout_s": 0.3}}
    async with FakeRun(tmp_path, prompts=8, token_s=0.03, **settings) as run:
        run.engine.managed = True
        run.write_services()
        run.engine.route_faults.plan("404", "/metrics", times=None)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert run.engine.starts == 2
        assert not [event for event in run.events("role") if event["state"] == "suspect"]
        assert not any("refill/running" in line["metrics"] for line in run.metrics())
