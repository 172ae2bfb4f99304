"""The rollout route as the orchestrator uses it: chosen by probe; and responses that outlive their server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nightshift.wire.errors import RoleError
from orchestrator.runner.answers import EngineAwayError, GenerateRequest, InvalidAnswerError
from orchestrator.runner.engine import Engine, EngineAddress
from orchestrator.runner.job import Job
from tests.fakes.audit import audit, balance
from tests.fakes.engine import FakeEngine
from tests.fakes.requests import GENERATE, INFO, ROUTE, VLLM, Request
from tests.fakes.run import FakeRun
from tests.fixtures.tokenizer_k import EOS

LONG = {"max_response_length": 40, "flush_tokens": 4}
PLAN = [7 + at % 20 for at in range(40)]  # forty tokens, none of which ends a response


def client(engine: FakeEngine, flush_tokens: int = 0) -> Engine:
    fields = {key: engine.address[key] for key in ("name", "url", "token", "incarnation")}
    return Engine(EngineAddress(**fields), 10.0, flush_tokens)


def wanted(**changes: Any) -> GenerateRequest:
    fields = {"request_id": "r.0", "prompt_ids": np.array([1, 5, 6], np.int32), "max_tokens": 12, "temperature": 1.0}
    return GenerateRequest(**{**fields, "stop_token_ids": (EOS,), "seed": 3, **changes})


def metric(run: FakeRun, name: str) -> float:
    return sum(line["metrics"].get(name) or 0 for line in run.metrics())


def rest_of(run: FakeRun) -> list[Request]:
    """Requests that go on behind a prefix."""
    shortest = min(len(request.prompt_ids) for request in run.samples())
    return [request for request in run.samples() if len(request.prompt_ids) > shortest + 1]


def labels_of(run: FakeRun, sample_id: str) -> list[str]:
    """The version of each token of a sample, by the servers' own record of its attempts."""
    attempts = [r for r in run.samples() if r.request_id.rpartition(".")[0] == f"{run.run_dir.name}.{sample_id}"]
    attempts.sort(key=lambda request: request.time)
    labels: list[str] = []
    for attempt in attempts:
        kept = len(attempt.prompt_ids) - len(attempts[0].prompt_ids)
        labels = labels[:kept] + attempt.labels
    return labels


# The choice of the route ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", sorted(VLLM))
async def test_every_version_is_drawn_from_by_our_route(tmp_path: Path, version: str) -> None:
    engine = FakeEngine(tmp_path, vllm=version)
    await engine.start()
    speaker = client(engine)
    try:
        assert (await speaker.connect()).route
        answer = await speaker.generate(wanted())
        assert len(answer.response_ids) > 0
        assert await speaker.weight_version() == "default"
        assert not engine.calls(GENERATE)
        assert not engine.calls("/weight_info")
    finally:
        await speaker.close()
        await engine.stop()


@pytest.mark.parametrize("version", sorted(VLLM))
async def test_without_our_route_a_version_that_counts_versions_itself_is_drawn_from(
    tmp_path: Path, version: str
) -> None:
    engine = FakeEngine(tmp_path, vllm=version, route=False)
    await engine.start()
    speaker = client(engine)
    try:
        if VLLM[version]["spans"]:
            assert not (await speaker.connect()).route
            assert len((await speaker.generate(wanted())).response_ids) > 0
            assert await speaker.weight_version() == "default"
        else:
            with pytest.raises(RoleError, match=r"--middleware services\.rollout\.route\.Route") as caught:
                await speaker.connect()
            assert version in str(caught.value)
    finally:
        await speaker.close()
        await engine.stop()


DEV_MODE = ["/pause", "/resume", "/is_paused", "/update_weights", "/weight_info"]


@pytest.mark.parametrize(
    ("route", "missing", "flag"),
    [
        (True, DEV_MODE, "VLLM_SERVER_DEV_MODE=1"),
        (False, DEV_MODE, "VLLM_SERVER_DEV_MODE=1"),
        (True, [GENERATE], "--enable-scale-out"),
        (False, [GENERATE], "--enable-scale-out"),
        (True, ["weight_transfer"], "--weight-transfer-config"),
        (True, ["weight_version"], "--api-server-count 1"),
    ],
)
async def test_a_missing_flag_is_named_before_anything_is_drawn(
    tmp_path: Path, route: bool, missing: list[str], flag: str
) -> None:
    async with FakeRun(tmp_path, prompts=4, route=route) as run:
        run.engine.missing = frozenset(missing)
        assert await run.run() == 1
        assert "[rollout]" in run.error()
        assert flag in run.error()
        assert not run.samples()


async def test_a_version_outside_the_range_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VLLM, "0.40.0", VLLM["0.33.0"])
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.vllm = "0.40.0"
        assert await run.run() == 1
        assert "has version 0.40.0. Use a version from 0.26 to 0.33" in run.error()


async def test_both_routes_give_the_same_sample(tmp_path: Path) -> None:
    answers = []
    for route in (True, False):
        engine = FakeEngine(tmp_path, route=route)
        await engine.start()
        speaker = client(engine, flush_tokens=3 if route else 0)
        try:
            answers.append(await speaker.generate(wanted()))
        finally:
            await speaker.close()
            await engine.stop()
    ours, theirs = answers
    np.testing.assert_array_equal(ours.response_ids, theirs.response_ids)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    assert (ours.versions, ours.finish_reason) == (theirs.versions, theirs.finish_reason)


async def test_a_whole_run_works_without_our_route(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, route=False) as run:
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert all(request.path == GENERATE for request in run.samples())
        assert not run.engine.calls(ROUTE)
        assert len(run.engine.calls(INFO)) == 1  # asked for once, and not there


async def test_spans_that_vllm_counts_otherwise_are_refused(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        run.engine.faults.plan("false_spans", times=2)
        assert await run.run() == 0, run.error()
        assert metric(run, "rollout/rejected/versions") == 2


# Responses that broke off ---------------------------------------------------------------------------------------------


async def test_the_client_hands_out_what_came_in_before_a_cut(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, script=lambda request: PLAN, token_s=0.001)
    await engine.start()
    speaker = client(engine, flush_tokens=4)
    try:
        engine.faults.plan("cut@10")
        with pytest.raises(EngineAwayError) as cut:
            await speaker.generate(wanted(max_tokens=40))
        assert cut.value.lost
        assert cut.value.partial is not None
        assert cut.value.partial.response_ids.tolist() == PLAN[:8]  # whole frames of four
        assert len(cut.value.partial.logprobs) == 8
        engine.faults.plan("abort@10")
        with pytest.raises(EngineAwayError) as aborted:
            await speaker.generate(wanted(max_tokens=40))
        assert aborted.value.partial is not None
        assert aborted.value.partial.response_ids.tolist() == PLAN[:10]
        assert aborted.value.partial.finish_reason == "abort"
    finally:
        await speaker.close()
        await engine.stop()


@pytest.mark.parametrize("fault", ["cut@10", "abort@10"])
async def test_o38_a_broken_response_goes_on_behind_its_prefix(tmp_path: Path, fault: str) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.0005, rollout=LONG) as run:
        run.engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]
        run.engine.faults.plan(fault, "g0000002", times=2)
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=1)
        assert balance(run) == {"issued": 8, "trained": 8}
        again = rest_of(run)
        assert len(again) == 2
        kept = 40 - again[0].sampling["max_tokens"]
        assert kept in (8, 10)
        assert again[0].prompt_ids[-kept:] == PLAN[:kept]
        for sample in (sample for update in run.updates for sample in update.samples):
            assert sample.response_ids.tolist() == PLAN
            assert sample.finish_reason == "length"
            assert (sample.versions[0].start, sample.versions[-1].end) == (0, 40)
        assert metric(run, "rollout/kept_tokens") == 2 * kept
        assert all(request.request_id.endswith(".1") for request in again)


async def test_o38_log_probs_at_the_seam_are_those_of_the_weights_that_drew_them(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, token_s=0.0005, rollout=LONG, pipeline={"max_staleness": 0}) as run:
        run.engine.faults.plan("abort@5", times=None, when=lambda request: request.request_id.endswith(".0"))
        assert await run.run() == 0, run.error()
        audit(run, steps=4, staleness=0)
        assert rest_of(run)
        # On policy: the trainer computes the same log-probs as the two servers did, before and after the seam.
        assert max(line["metrics"]["log_ratio/abs_mean"] for line in run.metrics()) < 1e-6


async def test_o38_a_killed_server_costs_the_rest_alone(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, servers=2, token_s=0.01, rollout=LONG) as run:
        for engine in run.engines:
            engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]

        async def watch(job: Job) -> None:
            victim = run.engines[1]

            def midway() -> bool:
                busy = [request for request in victim.samples if request.order in victim._running]
                return bool(run.updates) and bool(busy) and all(request.sent >= 8 for request in busy)

            await run.until(midway, "requests that have sent eight tokens")
            await run.restart(victim, 0.2)
            await asyncio.Event().wait()

        assert await run.run(watch=watch) == 0, run.error()
        audit(run, steps=4, staleness=1)
        again = rest_of(run)
        assert any(40 - request.sampling["max_tokens"] >= 8 for request in again)
        assert metric(run, "rollout/kept_tokens") >= 8
        whole = sum(len(request.tokens) for request in run.samples() if request.answered)
        assert whole <= 40 * 16 - metric(run, "rollout/kept_tokens")  # what was kept is not drawn again


async def test_o38_a_push_below_running_responses_is_seen_in_their_versions(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=12, token_s=0.004, rollout=LONG) as run:
        run.engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]
        run.engine.faults.plan("abort@30", times=4, skip=6)
        assert await run.run() == 0, run.error()
        audit(run, steps=6, staleness=1)
        mixed = 0
        for sample in (sample for update in run.updates for sample in update.samples):
            labels = [label for span in sample.versions for label in [span.version] * (span.end - span.start)]
            assert labels == labels_of(run, sample.sample_id)
            mixed += len(sample.versions) > 1
        assert mixed
        assert rest_of(run)


@pytest.mark.parametrize(("last", "reason"), [(EOS, "stop"), (9, "length")])
async def test_o33_a_response_of_which_only_the_end_was_lost_is_not_asked_for_again(
    tmp_path: Path, last: int, reason: str
) -> None:
    plan = [7, 8, 9, last]
    settings = {"max_response_length": 4 if reason == "length" else 8, "flush_tokens": 4}
    async with FakeRun(tmp_path, prompts=4, token_s=0.001, rollout=settings) as run:
        run.engine.script = lambda request: plan
        run.engine.faults.plan("drop", times=None)
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert len(run.samples()) == 8  # one request for each sample
        for sample in (sample for update in run.updates for sample in update.samples):
            assert (sample.response_ids.tolist(), sample.finish_reason) == (plan, reason)


async def test_tokens_of_unknown_weights_are_dropped_and_those_before_them_kept(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=4, token_s=0.001, rollout=LONG | {"flush_tokens": 35}) as run:
        run.engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]
        run.engine.faults.plan("null_version", "g0000001.0.0")  # of the last frame, which holds what is left
        assert await run.run() == 0, run.error()
        audit(run, steps=2, staleness=1)
        assert metric(run, "rollout/rejected/version") == 1
        (again,) = rest_of(run)
        assert again.request_id.endswith("g0000001.0.1")
        assert 0 < 40 - again.sampling["max_tokens"] < 40


async def test_a_deterministic_run_draws_whole_samples_again(tmp_path: Path) -> None:
    settings = {"pipeline": {"max_staleness": 0, "deterministic": True}}
    weights = []
    for fault in (None, "abort@6"):
        folder = tmp_path / str(fault)
        folder.mkdir()
        async with FakeRun(folder, prompts=8, token_s=0.0005, rollout=LONG, **settings) as run:
            if fault:
                run.engine.faults.plan(fault, times=3, skip=2)
            assert await run.run() == 0, run.error()
            audit(run, steps=4, staleness=0)
            assert all(request.flush_tokens == 0 for request in run.samples())
            lengths = {len(request.prompt_ids) for request in run.samples()}
            assert max(lengths) - min(lengths) <= 1
            assert metric(run, "rollout/kept_tokens") == 0
            weights.append(run.updates[-1].weights)
    np.testing.assert_array_equal(weights[0], weights[1])


async def test_a_response_that_no_update_could_use_any_more_is_not_drawn_on(tmp_path: Path) -> None:
    """A group that grows too old while it runs is dropped: what it had drawn is not gone on with."""
    settings = {"pipeline": {"max_staleness": 1, "on_stale": "drop"}}
    async with FakeRun(tmp_path, prompts=30, token_s=0.001, rollout=LONG, **settings) as run:
        run.engine.script = lambda request: PLAN[40 - request.sampling["max_tokens"] :]
        run.engine.faults.plan("stall@8", "g0000001.0.0")
        assert await run.run() == 0, run.error()
        audit(run, steps=len(run.metrics()), staleness=1)
        (only,) = (request for request in run.samples() if ".g0000001.0." in request.request_id)
        assert only.sent >= 8
        assert balance(run)["dropped_stale"] >= 1


async def test_a_frame_of_another_request_ends_the_sample_there(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path)
    await engine.start()
    speaker = client(engine)
    try:
        engine.faults.plan("wrong_id")
        with pytest.raises(InvalidAnswerError, match=r"asked for r\.0, answered 'somebody\.else'"):
            await speaker.generate(wanted())
    finally:
        await speaker.close()
        await engine.stop()
