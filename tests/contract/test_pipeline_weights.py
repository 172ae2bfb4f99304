"""Weight pushes: their order, their failures, and servers that restart, leave and join."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.runner.engine import Engine
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import GENERATE, INFO, PREFETCH, ROUTE, Request
from tests.fakes.run import FakeRun

PUSH = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", INFO]


def admin(engine: FakeEngine) -> list[str]:
    """Paths of the calls that are no samples and no scores."""
    paths = [request.path.split("?")[0] for request in engine.requests if request.path not in (GENERATE, ROUTE)]
    return [path for path in paths if path not in ("/health", "/metrics")]


def of_step(request: Request) -> int:
    return int(request.version.rsplit("/", 1)[-1])


@pytest.mark.parametrize("staleness", [0, 1])
async def test_o40_weights_are_pushed_whole_before_the_next_request(tmp_path: Path, staleness: int) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.001, pipeline={"max_staleness": staleness}) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=staleness)
        assert admin(run.engine) == [INFO, "/init_weight_transfer_engine", *PUSH * 5]
        assert {request.path for request in run.engine.calls("/pause")} == {"/pause?mode=keep&clear_cache=false"}
        assert run.engine.stale_cache_hits == 0
        versions = [call.body["weight_version"] for call in run.engine.calls("/finish_weight_update")]
        assert versions == [f"{run.run_dir.name}/0/{step}" for step in range(5)]
        for sample in (sample for update in run.updates for sample in update.samples):
            held = {r.request_id.rpartition(".")[0]: r.version for r in run.samples()}
            assert sample.versions[0].version >= held[f"{run.run_dir.name}.{sample.sample_id}"]
        if staleness == 0:  # no request comes between the phases of a push
            for request in run.samples():
                before = [call for call in run.engine.requests[: request.order] if call.path.split("?")[0] in PUSH]
                assert before[-1].path == INFO


@pytest.mark.parametrize("why", ["asked", "unable", "drain", "deterministic"])
async def test_a_server_forgets_its_cache_where_it_cannot_be_kept(tmp_path: Path, why: str) -> None:
    pipeline: dict[str, Any] = {
        "asked": {"keep_cache": False},
        "unable": {},
        "drain": {"weight_update": "drain"},
        "deterministic": {"deterministic": True, "max_staleness": 0},
    }[why]
    async with FakeRun(tmp_path, prompts=8, token_s=0.001, pipeline=pipeline) as run:
        run.engine.missing = frozenset({"keep_cache"} if why == "unable" else ())
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=pipeline.get("max_staleness", 1))
        assert all("clear_cache" not in request.path for request in run.engine.calls("/pause"))
        assert run.engine.stale_cache_hits == 0


async def test_weights_that_come_by_http_are_fetched_before_decoding_stops(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.001) as run:
        run.engine.source = {"url": "http://127.0.0.1:9/weights", "token": "t"}
        run.write_services()
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert admin(run.engine) == [INFO, "/init_weight_transfer_engine", *[PREFETCH, *PUSH] * 5]
        (prepared,) = run.engine.calls("/init_weight_transfer_engine")
        assert prepared.body == {"init_info": run.engine.source}
        fetched = [call.body["update_info"]["path"] for call in run.engine.calls(PREFETCH)]
        assert fetched == [call.body["update_info"]["path"] for call in run.engine.calls("/update_weights")]
        assert not any(call.paused for call in run.engine.calls(PREFETCH))


async def test_weights_that_cannot_be_fetched_fail_the_push_while_decoding_goes_on(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"max_staleness": 0}) as run:
        run.engine.source = {"url": "http://127.0.0.1:9/weights", "token": "t"}
        run.write_services()
        run.engine.route_faults.plan("422", PREFETCH, times=None, skip=2)
        assert await run.run() == 1
        assert "[rollout] rollout-0 refused /nightshift/v1/prefetch with 422" in run.error()
        assert len(run.updates) == 2
        assert len(run.engine.calls("/pause")) == 2
        assert run.engine._go.is_set()


@pytest.mark.parametrize("phase", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_o40_a_failing_push_ends_the_run_and_the_next_start_works(tmp_path: Path, phase: str) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"max_staleness": 0}, trainer={"save_freq": 1}) as run:
        fault = run.engine.route_faults.plan("500", phase, times=None, skip=2)
        began = time.monotonic()
        assert await run.run() == 1
        assert time.monotonic() - began < 30
        assert f"[rollout] rollout-0 answered {phase}" in run.error()
        assert "with 500" in run.error()
        assert len(run.updates) == 2  # the push of step 2 failed: nothing was trained on older weights
        assert {of_step(request) for request in run.samples()} == {0, 1}
        assert run.engine._go.is_set()
        fault.times = 0
        assert await run.run(resume=True) == 0, run.error()
        audit(run, steps=4, staleness=0)


async def test_o40_the_probe_catches_a_push_that_does_nothing(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=16, pipeline={"max_staleness": 0}) as run:
        run.scorers.reward = lambda sample: float(np.mean(sample["response_ids"]))
        run.engine.route_faults.plan("noop", "/update_weights", times=None, skip=1)
        assert await run.run() == 1
        assert f"[rollout] rollout-0 does not compute with the weights of {run.run_dir.name}/0/1" in run.error()
        assert "reported success but the weights did not arrive" in run.error()
        assert len(run.updates) == 1


async def test_o40_the_probe_catches_a_small_update_that_does_not_arrive(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 0}, "trainer": {"learning_rate": 0.02}}
    async with FakeRun(tmp_path, prompts=16, **settings) as run:
        run.scorers.reward = lambda sample: float(np.mean(sample["response_ids"]))
        run.engine.route_faults.plan("noop", "/update_weights", times=None, skip=1)
        assert await run.run() == 1
        assert "does not compute with the weights" in run.error()


async def test_a_server_that_keeps_its_old_version_is_not_used(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, pipeline={"max_staleness": 0}) as run:
        run.engine.route_faults.plan("ignore_version", "/finish_weight_update", times=None, skip=1)
        assert await run.run() == 1
        assert "holds 'fake-20260101-000000-abcd/0/0' after a push of" in run.error()
        assert len(run.updates) == 1


async def test_a_push_that_hangs_meets_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Engine._call.__kwdefaults__, "timeout_s", 0.3)
    async with FakeRun(tmp_path, prompts=8, pipeline={"max_staleness": 0}) as run:
        run.engine.route_faults.plan("hang", "/update_weights", times=None, skip=1)
        assert await run.run() == 1
        assert "[rollout] rollout-0 did not answer /update_weights within 0.3 s" in run.error()
        assert run.engine._go.is_set()


# Servers that come and go ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away_s", [0.0, 0.8])
async def test_o38c_a_restarted_server_is_pushed_and_proved_before_it_is_used(tmp_path: Path, away_s: float) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.005) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2 and run.engine.running >= 2, "running requests")
            await run.restart(run.engine, away_s)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}
        assert run.engine.starts == 3  # made, started, started again
        assert any("holds" in event["detail"] for event in run.events("role") if event["state"] == "ready")
        assert all(request.version != "default" for request in run.samples() if request.status == 200)


async def test_a_server_that_dies_during_a_push_is_waited_for(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.002) as run:
        run.engine.route_faults.plan("hang", "/update_weights", times=1, skip=2)

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.engine.calls("/update_weights")) == 3, "the third push")
            await run.restart(run.engine, 0.3)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}


async def test_weights_inside_a_gpu_stay_as_they_are_while_a_slow_server_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next publication overwrites them where they lie, so that it waits for a push that came late."""
    monkeypatch.setattr("orchestrator.runner.fleet._LEAST_GRACE_S", 0.01)
    run = FakeRun(tmp_path, prompts=16, servers=2, token_s=0.001)
    run.trainer.backend = "ipc"
    publish, taking = run.trainer.Publish, []

    async def watched(request: Any, context: Any) -> Any:
        taking.append([engine._session is not None for engine in run.engines])
        return await publish(request, context)

    monkeypatch.setattr(run.trainer, "Publish", watched)
    async with run:
        run.engines[1].route_faults.plan("slow", "/update_weights", times=4, skip=1, delay=0.5)
        assert await run.run() == 0, run.error()
        audit(run, steps=8, staleness=1)
        assert taking == [[False, False]] * 9
        assert any("rollout-1 is left out" in text for text in run.warnings())


async def test_a_server_that_is_not_up_yet_at_the_start_is_waited_for(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        await run.engine.kill()

        async def watch(job: Job) -> None:
            await asyncio.sleep(0.3)
            await run.restart(run.engine)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=2, staleness=1)


async def test_a_token_of_an_earlier_start_costs_no_sample(tmp_path: Path) -> None:
    """The server restarts between two requests; its new address is written a moment later."""
    async with FakeRun(tmp_path, prompts=12, token_s=0.002) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "two updates")
            await run.engine.kill()
            await run.engine.start()
            await run.until(lambda: any(r.status == 401 for r in run.engine.requests), "a request with the old token")
            run.write_services()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert balance(run) == {"issued": 12, "trained": 12}
        assert sum(line["metrics"]["rollout/failed_samples"] for line in run.metrics()) == 0


async def test_a_deterministic_run_ends_the_same_after_a_restart(tmp_path: Path) -> None:
    weights = []
    for name in ("plain", "restarted"):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"pipeline": {"max_staleness": 0, "deterministic": True}}
        async with FakeRun(folder, prompts=8, token_s=0.005, **settings) as run:

            async def restart(job: Job, run: FakeRun = run) -> None:
                await run.until(lambda: len(run.updates) >= 2 and run.engine.running >= 2, "running requests")
                await run.restart(run.engine, 0.2)
                await asyncio.Event().wait()

            assert await run.run(watch=restart if name == "restarted" else None) == 0, run.error()
            audit(run, steps=4, staleness=0)
            assert run.engine.starts == (3 if name == "restarted" else 2)
            weights.append(run.updates[-1].weights)
    np.testing.assert_array_equal(weights[0], weights[1])


async def test_work_goes_to_the_least_loaded_of_several_servers(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 2}}
    async with FakeRun(tmp_path, prompts=16, servers=3, token_s=0.002, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=8, staleness=2)
        counts = [len(engine.samples) for engine in run.engines]
        assert sum(counts) == 32
        assert min(counts) >= 5
        assert all(len(engine.calls("/finish_weight_update")) == 9 for engine in run.engines)


async def test_a_server_that_leaves_costs_nothing_but_its_speed(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=24, servers=2, token_s=0.004) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 3 and run.engines[1].running, "three updates")
            await run.engines[1].kill()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert balance(run) == {"issued": 24, "trained": 24}
        # A push finds it gone, or one of its requests does before that.
        noticed = [event.get("detail", "") for event in run.events("role") if event["state"] == "suspect"]
        assert any("rollout-1" in text for text in (*run.warnings(), *noticed))


async def test_a_server_that_joins_gets_the_weights_before_it_gets_work(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=40, token_s=0.006) as run:
        late = FakeEngine(run.engine.store, "rollout-late", token_s=0.006, logs=run.engine.logs)

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2, "two updates")
            await late.start()
            run.engines.append(late)
            run.write_services()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=20, staleness=1)
        assert late.samples
        assert all(request.version != "default" for request in late.samples)
        assert admin(late)[:8] == [INFO, "/init_weight_transfer_engine", *PUSH]


async def test_a_server_that_never_takes_weights_gets_no_work(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, servers=2) as run:
        run.engines[1].route_faults.plan("500", "/update_weights", times=None)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert not run.engines[1].samples
        assert run.engines[1]._go.is_set()
