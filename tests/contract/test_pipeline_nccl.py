"""Weights that the trainer sends to each server over a link of the two, while the server receives them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.fabric import LinkedRun


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.runner.watcher._LOOK_S", 0.05)
    monkeypatch.setattr("orchestrator.runner.health._FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr("orchestrator.runner.health._LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("orchestrator.runner.fleet._LEAST_GRACE_S", 0.5)


def versions(run: LinkedRun, steps: int) -> list[str]:
    return [f"{run.run_dir.name}/0/{step}" for step in range(steps + 1)]


@pytest.mark.parametrize("vllm", ["0.26.0", "0.32.0"])
async def test_every_version_is_sent_to_every_server_over_one_link(tmp_path: Path, vllm: str) -> None:
    run = LinkedRun(tmp_path, prompts=12, servers=2, token_s=0.001)
    for engine in run.engines:
        engine.vllm = vllm
    async with run:
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert sorted(run.trainer.opened) == [("rollout-0", vllm == "0.26.0"), ("rollout-1", vllm == "0.26.0")]
        for engine in run.engines:
            (joined,) = engine.calls("/init_weight_transfer_engine")
            assert joined.body["init_info"]["rank_offset"] == 1
            assert [version for name, version in run.trainer.sent if name == engine.name] == versions(run, 6)
            assert engine.samples
        assert run.trainer.dropped == []


async def test_a_server_that_never_joins_is_left_out_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.runner.weight_link._GRACE_S", 0.1)
    async with LinkedRun(tmp_path, prompts=40, servers=2, token_s=0.005) as run:
        run.engines[1].route_faults.plan("hang", "/init_weight_transfer_engine", times=2)
        run.trainer.impatience["rollout-1"] = [0.5, 0.5]
        assert await run.run() == 0, run.error()
        audit(run, steps=20, staleness=1)
        assert len([name for name, _ in run.trainer.opened if name == "rollout-1"]) >= 2
        assert "rollout-1" in run.trainer.dropped
        told = [event["detail"] for event in run.events("role") if event["state"] == "suspect"]
        assert any("rollout-1 hangs in a transfer that the trainer has given up" in text for text in told)
        assert all(request.version != "default" for request in run.engines[1].samples)
        assert run.engines[0].samples


async def test_a_server_that_dies_within_a_transfer_comes_back_over_another_link(tmp_path: Path) -> None:
    async with LinkedRun(tmp_path, prompts=16, token_s=0.002) as run:
        run.engine.route_faults.plan("hang", "/update_weights", times=1, skip=2)

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.engine.calls("/update_weights")) == 3, "the third push")
            await run.restart(run.engine, 0.3)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=8, staleness=1)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert run.trainer.dropped == ["rollout-0"]  # the trainer was told, and waits for nobody
        assert [name for name, _ in run.trainer.opened] == ["rollout-0"] * 2
        assert [version for _, version in run.trainer.sent] == versions(run, 8)


async def test_a_restarted_server_is_sent_the_same_weights_again(tmp_path: Path) -> None:
    async with LinkedRun(tmp_path, prompts=16, token_s=0.005) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 2 and run.engine.running >= 2, "running requests")
            await run.restart(run.engine)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=8, staleness=1)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert len(run.trainer.opened) == 2
        assert any("holds" in event["detail"] for event in run.events("role") if event["state"] == "ready")


async def test_one_of_two_servers_to_which_nothing_can_be_sent_costs_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits for a transfer that never comes: the other one goes on beside it."""
    monkeypatch.setattr("orchestrator.runner.weight_link._GRACE_S", 0.1)
    async with LinkedRun(tmp_path, prompts=24, servers=2, token_s=0.002) as run:
        send = run.trainer._over

        async def failing(method: str, request: object, context: object) -> None:
            if method == "SendWeights" and request.server == "rollout-1":  # type: ignore[attr-defined]
                run.trainer.faults.plan("internal", "SendWeights")
            await send(method, request, context)

        monkeypatch.setattr(run.trainer, "_over", failing)
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=1)
        assert not run.engines[1].samples
        assert {name for name, _ in run.trainer.sent} == {"rollout-0"}
        assert [version for _, version in run.trainer.sent] == versions(run, 12)


async def test_a_server_that_refuses_the_weights_ends_the_run_by_name(tmp_path: Path) -> None:
    async with LinkedRun(tmp_path, prompts=8, pipeline={"max_staleness": 0}) as run:
        run.engine.route_faults.plan("500", "/update_weights", times=None, skip=1)
        assert await run.run() == 1
        assert "[rollout] rollout-0 answered /update_weights with 500" in run.error()
        assert run.trainer.dropped == ["rollout-0"]


async def test_another_trainer_makes_links_of_its_own(tmp_path: Path) -> None:
    async with LinkedRun(tmp_path, prompts=16, token_s=0.002, trainer={"save_freq": 1}) as run:

        async def watch(job: Job) -> None:
            await run.until(lambda: len(run.updates) >= 3, "three updates")
            await run.replace_trainer()
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        assert len(run.trainer.opened) == 2
        assert run.trainer.sent[-1][1].endswith("/8")


async def test_a_server_that_joins_the_run_gets_a_link_of_its_own(tmp_path: Path) -> None:
    async with LinkedRun(tmp_path, prompts=40, token_s=0.006) as run:
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
        assert [name for name, _ in run.trainer.opened] == ["rollout-0", "rollout-late"]
