"""Servers that sleep while the trainer makes a step: the order of it, and everything that may go wrong with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nightshift.wire.restart_request import take_restart
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import GENERATE, INFO, ROUTE
from tests.fakes.run import FakeRun

WHOLE = {"weights", "kv_cache"}
PUSH = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
CYCLE = [
    *("/sleep?level=2&mode=abort", "/is_sleeping"),
    *("/is_sleeping", "/wake_up?tags=weights", "/pause?mode=keep&clear_cache=false", *PUSH),
    *("/wake_up?tags=kv_cache", "/resume", "/is_sleeping", INFO),
]


def sleeping(folder: Path, **settings: Any) -> FakeRun:
    """A run whose servers sleep; its trainer checks that they do whenever it works."""
    patient: dict[str, dict[str, Any]] = {
        "rollout": {"sleep_mode": True, "request_timeout_s": 60.0},
        "pipeline": {"max_staleness": 0, "role_timeout_s": 60.0},
        "scorers": {"timeout_s": 60.0},
        "trainer": {"update_timeout_s": 60.0},
    }
    run = FakeRun(folder, **settings | {name: values | settings.get(name, {}) for name, values in patient.items()})

    async def work(samples: Any, final: bool) -> None:
        awake = [engine.name for engine in run.engines if engine.alive and engine.asleep != WHOLE]
        assert not awake, f"the trainer works while {awake} hold their memory"

    run.trainer._work = work  # type: ignore[method-assign]
    return run


def admin(engine: FakeEngine) -> list[str]:
    """Calls that are no samples and no scores."""
    paths = [request.path for request in engine.requests if request.path not in (GENERATE, ROUTE)]
    return [path for path in paths if path not in ("/health", "/metrics")]


def suspects(run: FakeRun) -> list[str]:
    return [event["detail"] for event in run.events("role") if event["state"] in ("suspect", "dead", "restarting")]


async def agent(run: FakeRun, causes: list[str]) -> None:
    """Starts servers again when the runner asks for it, as the agent does."""
    while True:
        for engine in run.engines:
            if (cause := take_restart(run.run_dir, engine.name, engine.incarnation)) is not None:
                causes.append(cause)
                await run.restart(engine, 0.05)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_servers_sleep_while_the_trainer_works_and_wake_for_the_new_weights(
    tmp_path: Path, deterministic: bool
) -> None:
    settings = {"pipeline": {"deterministic": deterministic}, "trainer": {"test_freq": 1}}
    async with sleeping(tmp_path, prompts=8, test_prompts=2, token_s=0.001, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert not suspects(run)
        assert not run.warnings()
        assert run.engine.resumed_asleep == 0
        assert run.engine.asleep == set()
        if not deterministic:  # there, batches are held between the pushes
            calls = admin(run.engine)
            assert calls[2:9] == ["/is_sleeping", "/pause?mode=keep&clear_cache=false", *PUSH, "/resume", INFO]
            assert calls[9:] == CYCLE * 4
        assert len(run.metrics("evaluation")) == 5
        for line in run.metrics():
            assert line["metrics"]["timing/sleep"] > 0
            assert 0 < line["metrics"]["timing/wake"] <= line["metrics"]["timing/sync"]
            assert line["metrics"]["update/parts"] == 1
            assert line["metrics"]["rollout/servers_usable"] == 1
        names = [span["name"] for span in run.events("span")]
        assert names.count("sleep") == 4
        woken = [span for span in run.events("span") if span["name"] == "push_weights"]
        assert all(span["attributes"]["rl.wake_seconds"] > 0 for span in woken[1:])


async def test_all_of_several_servers_sleep(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=12, servers=3, token_s=0.001) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=0)
        assert [len(engine.calls("/sleep")) for engine in run.engines] == [6, 6, 6]


@pytest.mark.parametrize(
    ("missing", "route", "said"),
    [
        ({"/sleep"}, True, "does not offer /sleep, /wake_up and /is_sleeping"),
        ({"sleep_mode"}, True, "does not offer its memory to others .* --enable-sleep-mode"),
        (set(), False, "does not offer /sleep, /wake_up and /is_sleeping"),
    ],
)
async def test_a_server_that_cannot_sleep_is_refused_at_the_start(
    tmp_path: Path, missing: set[str], route: bool, said: str
) -> None:
    async with sleeping(tmp_path, prompts=4, route=route) as run:
        run.engine.missing = frozenset(missing)
        assert await run.run() == 1
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(run.error())
        assert not run.samples()


async def test_a_sleep_that_is_not_honoured_is_noticed_before_the_step(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=4) as run:
        run.engine.route_faults.plan("noop", "/sleep", times=None)
        assert await run.run() == 1
        assert "rollout-0 answered /sleep with success, and is awake" in run.error()
        assert not run.updates


async def test_a_wake_that_is_not_honoured_is_noticed(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=4) as run:
        run.engine.route_faults.plan("noop", "/wake_up?tags=kv_cache", times=None)
        assert await run.run() == 1
        assert "rollout-0 answered /wake_up with success, and sleeps on" in run.error()


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
async def test_a_server_that_cannot_wake_is_started_again(tmp_path: Path, tag: str) -> None:
    async with sleeping(tmp_path, prompts=8) as run:
        run.engine.managed = True
        run.write_services()
        run.engine.route_faults.plan("500", f"/wake_up?tags={tag}", skip=1)
        causes: list[str] = []
        assert await run.run(watch=lambda job: agent(run, causes)) == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert causes == [f"rollout-0 answered /wake_up?tags={tag} with 500: " + causes[0].partition("500: ")[2]]
        assert run.engine.starts == 3
        assert run.engine.resumed_asleep == 0


async def test_a_server_of_nobody_that_cannot_wake_fails_the_job_by_name(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=4) as run:
        run.engine.route_faults.plan("500", "/wake_up", times=None)
        assert await run.run() == 1
        assert "[rollout] rollout-0 answered /wake_up?tags=weights with 500" in run.error()


async def test_a_server_that_cannot_sleep_now_is_started_again_and_sleeps_then(tmp_path: Path) -> None:
    """The step goes on meanwhile: its server is being killed, and with it its memory is free."""
    async with sleeping(tmp_path, prompts=8) as run:
        run.engine.managed = True
        run.write_services()
        run.trainer._work = slow  # type: ignore[method-assign]
        run.engine.route_faults.plan("500", "/sleep", skip=1)
        causes: list[str] = []
        assert await run.run(watch=lambda job: agent(run, causes)) == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert "/sleep?level=2&mode=abort with 500" in causes[0]
        assert run.engine.starts == 3


async def slow(samples: Any, final: bool) -> None:
    await asyncio.sleep(0.05)


async def test_a_server_that_dies_asleep_sleeps_again_and_wakes_with_the_new_weights(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=8) as run:
        died = []

        async def work(samples: Any, final: bool) -> None:
            assert run.engine.asleep == WHOLE
            if len(run.updates) == 1 and not died:
                died.append(run.engine.incarnation)
                await run.restart(run.engine, 0.1)
                await run.until(lambda: run.engine.asleep == WHOLE, "the new start to sleep")
                assert not run.engine.calls("/start_weight_update")[2:]  # no weights on the way to it

        run.trainer._work = work  # type: ignore[method-assign]
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert balance(run) == {"issued": 8, "trained": 8}
        assert run.engine.starts == 3


async def test_a_server_that_dies_asleep_and_is_away_for_the_push_is_waited_for(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=8) as run:
        again: list[asyncio.Task[None]] = []

        async def work(samples: Any, final: bool) -> None:
            if len(run.updates) == 1:
                await run.engine.kill()
                again.append(asyncio.create_task(run.restart(run.engine, 0.5)))

        run.trainer._work = work  # type: ignore[method-assign]
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert run.engine.starts == 3


async def test_a_run_is_resumed_with_a_server_that_was_left_asleep(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=8, trainer={"save_freq": 1}, pipeline={"retries": 0}) as run:
        run.trainer.faults.plan("internal", "Update", skip=2)
        assert await run.run() == 1
        assert "no space left on device" in run.error()
        assert run.engine.asleep == WHOLE
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert run.engine.resumed_asleep == 0


async def test_a_trainer_that_is_lost_in_a_step_finds_its_servers_asleep(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=8, trainer={"save_freq": 1}) as run:
        lost: list[int] = []

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) == 2 and run.engine.asleep == WHOLE, "the third step")
            lost.append(len(run.updates))
            await run.replace_trainer()
            await asyncio.Event().wait()

        async def work(samples: Any, final: bool) -> None:
            assert run.engine.asleep == WHOLE
            if len(run.updates) == 2 and not lost:
                await asyncio.sleep(3600)

        run.trainer._work = work  # type: ignore[method-assign]
        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert lost == [2]
        assert run.engine.resumed_asleep == 0


async def test_a_stop_in_a_step_leaves_no_server_asleep(tmp_path: Path) -> None:
    async with sleeping(tmp_path, prompts=8) as run:

        async def work(samples: Any, final: bool) -> None:
            if len(run.updates) == 1:
                stop()

        run.trainer._work = work  # type: ignore[method-assign]
        jobs: list[Job] = []

        def stop() -> None:
            jobs[0].stop()

        async def watch(job: Job) -> None:
            jobs.append(job)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 130
        assert run.engine.asleep == set()
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=4, staleness=0)
