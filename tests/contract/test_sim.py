"""The simulated services keep the contracts that the fakes keep, and show what the pipeline costs as it grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import orchestrator.runner.pipeline
from nightshift.algorithms import staleness as rules
from nightshift.analysis.audit import audit as audit_run
from nightshift.analysis.evidence import load
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.run import FakeRun
from tests.sim.clock import Clock, run_virtual
from tests.sim.engine import SimEngine
from tests.sim.lengths import Lengths
from tests.sim.model import Speed
from tests.sim.run import Scale, SimRun

SHORT = Lengths(median=30, sigma=1.0, largest=90)


class OnSimEngines(FakeRun):
    """The run of the other contract tests, with simulated engines in place of fake ones."""

    speed = Speed(slots=8, kv_tokens=2000)
    factor = 2.0

    def _engine(self, store: Path, name: str, *, token_s: float, route: bool) -> FakeEngine:
        clock, logs = Clock(self.factor), self.run_dir / "logs"
        return SimEngine(store, name, clock=clock, speed=self.speed, lengths=SHORT, route=route, logs=logs)


@pytest.mark.parametrize("route", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 2, None])
async def test_a_run_on_simulated_engines_is_audited(tmp_path: Path, staleness: int | None, route: bool) -> None:
    settings = {"pipeline": {"max_staleness": staleness, "max_groups_in_flight": 6}}
    async with OnSimEngines(tmp_path, prompts=16, route=route, rollout={"max_response_length": 64}, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=8, staleness=staleness)
        assert balance(run) == {"issued": 16, "trained": 16}
        assert run.engine.running == 0


class OnSlowEngines(OnSimEngines):
    """Responses that take far longer than a push does, on a busy machine too."""

    factor = 0.25


async def test_weights_change_under_simulated_responses(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 2}, "rollout": {"max_response_length": 64, "flush_tokens": 8}}
    async with OnSlowEngines(tmp_path, prompts=24, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=12, staleness=2)
        assert max(len(sample.versions) for update in run.updates for sample in update.samples) >= 2


async def test_a_simulated_engine_drains(tmp_path: Path) -> None:
    settings = {"pipeline": {"weight_update": "drain"}, "rollout": {"max_response_length": 64}}
    async with OnSimEngines(tmp_path, prompts=12, **settings) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        assert {len(sample.versions) for update in run.updates for sample in update.samples} == {1}


async def test_what_a_lost_simulated_engine_had_sent_is_kept(tmp_path: Path) -> None:
    settings = {"rollout": {"max_response_length": 64, "flush_tokens": 4}, "pipeline": {"max_staleness": 1}}
    async with OnSimEngines(tmp_path, prompts=16, **settings) as run:

        async def kill(_job: Any) -> None:
            await run.until(lambda: any(r.sent >= 8 and not r.answered for r in run.samples()), "a part of a response")
            await run.restart(run.engine)
            await run.until(lambda: False, "the end of the run", 60.0)

        assert await run.run(watch=kill, limit_s=60.0) == 0, run.error()
        audit(run, steps=8, staleness=1)
        assert sum(line["metrics"]["rollout/kept_tokens"] for line in run.metrics()) >= 8


SCALE = Scale(engines=4, speed=Speed(slots=16), score_s=20.0, train_token_s=6e-4)


def virtual(folder: Path, batch: int, scale: Scale = SCALE, **pipeline: Any) -> SimRun:
    """A run on a virtual clock to its end."""

    async def go() -> SimRun:
        job = {"rollout": {"batch_size": batch, "n": 2}, "trainer": {"total_steps": 6}, "pipeline": pipeline}
        run = SimRun(folder, scale, keep=batch <= 8, **job)
        with run.in_process():
            async with run:
                assert await run.run(limit_s=1e6) == 0, run.error()
        return run

    return run_virtual(go(), 0.01)


@pytest.mark.parametrize("weight_update", ["in_flight", "drain"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_on_a_virtual_clock_is_audited(tmp_path: Path, staleness: int, weight_update: str) -> None:
    run = virtual(tmp_path, 8, max_staleness=staleness, weight_update=weight_update)
    found = audit_run(load(run.run_dir))
    assert found.balanced, [finding.message for finding in found.findings]
    assert run.sim_trainer.samples == 6 * 8 * 2
    assert run.sim_trainer.twice == 0
    assert max(run.sim_trainer.ages) <= staleness
    assert any(sim.gaps for sim in run.sims) == (staleness > 0 and weight_update == "in_flight")


@pytest.mark.parametrize("pipeline", [{}, {"weight_update": "drain"}, {"on_stale": "drop"}], ids=str)
def test_a_judge_and_a_trainer_that_take_no_time_hold_nothing_up(tmp_path: Path, pipeline: dict[str, str]) -> None:
    """Steps and pushes follow one another at once, and each group that ends makes a part of an update."""
    at_once = replace(SCALE, score_s=0.0, train_token_s=0.0, publish_s=0.0)
    run = virtual(tmp_path, 8, at_once, max_staleness=7, **pipeline)
    found = audit_run(load(run.run_dir))
    assert found.balanced, [finding.message for finding in found.findings]
    assert (run.sim_trainer.samples, run.sim_trainer.twice) == (6 * 8 * 2, 0)
    assert max(run.sim_trainer.ages) <= 7


@pytest.mark.parametrize("keep", [True, False])
def test_a_cache_that_is_kept_is_not_read_again(tmp_path: Path, keep: bool) -> None:
    run = virtual(tmp_path, 8, max_staleness=2, keep_cache=keep)
    assert any(sim.gaps for sim in run.sims)
    assert any(sim.model.recomputed for sim in run.sims) == (not keep)


def test_two_virtual_runs_take_the_same_time(tmp_path: Path) -> None:
    paces = []
    for name in ("first", "second"):
        (folder := tmp_path / name).mkdir()
        paces.append(virtual(folder, 4, max_staleness=0).sim_trainer.applied)
    first, second = paces
    assert np.diff(first) == pytest.approx(np.diff(second), abs=0.1)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_a_group_costs_does_not_grow_with_the_groups_in_flight(tmp_path: Path, streaming: bool) -> None:
    """Counted, not timed: groups that decisions look at, for each group that is trained."""
    looked_at = []
    for batch in (16, 64):
        count = 0

        def plan_part(step: int, ready: Any, running: Any, **options: Any) -> rules.PartPlan:
            nonlocal count
            count += len(ready) + len(running)
            return rules.plan_part(step, ready, running, **options)

        (folder := tmp_path / str(batch)).mkdir()
        with mock.patch.object(orchestrator.runner.pipeline, "plan_part", plan_part):
            run = virtual(folder, batch, max_staleness=3, streaming=streaming)
        assert run.sim_trainer.samples == 6 * batch * 2
        looked_at.append(count / (6 * batch))
    few, many = looked_at
    assert many < 2 * few, f"{few:.1f} looks a group with 16 groups a step, {many:.1f} with 64"
