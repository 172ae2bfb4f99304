"""Every prompt group has a trace of its own, linked to the job's, from the prompt to the gradient (case O-46)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.fakes.run import FakeRun

JOB = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{JOB}-00f067aa0ba902b7-01"


def trace_of(traceparent: str) -> str:
    return traceparent.split("-")[1]


def group_of(request_id: str) -> str:
    return request_id.split(".")[-3]


async def test_o46_the_callers_trace_is_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", TRACEPARENT)
    async with FakeRun(tmp_path, prompts=8, test_prompts=2, trainer={"save_freq": 2}) as run:
        assert await run.run() == 0, run.error()
        contexts = [call.context for call in run.scorers.calls] + run.trainer.contexts
        assert {context.job_trace_id for context in contexts} == {JOB}
        assert {context.run_id for context in contexts} == {run.run_dir.name}
        spans = run.events("span")
        assert {span["attributes"]["job_trace_id"] for span in spans if span["name"] != "job"} == {JOB}
        assert {span["trace_id"] for span in spans if span["name"] in ("job", "optimizer_step", "publish")} == {JOB}
        assert run.events("summary")[0]["job_trace_id"] == JOB


@pytest.mark.parametrize("text", ["", "garbage", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"])
async def test_o46_without_a_usable_trace_the_job_begins_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TRACEPARENT", text)
    async with FakeRun(tmp_path, prompts=2) as run:
        assert await run.run() == 0, run.error()
        assert len(run.events("summary")[0]["job_trace_id"]) == 32


async def test_o46_a_group_is_one_trace_through_all_roles(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8, scorers={"batch_samples": 6, "batch_wait_ms": 20.0}) as run:
        run.engine.faults.plan("503", "g0000002.1", times=2)
        assert await run.run() == 0, run.error()
        traces: dict[str, set[str]] = defaultdict(set)
        for request in run.samples():
            traces[group_of(request.request_id)].add(trace_of(request.headers["traceparent"]))
        for update in run.updates:
            for sample in update.samples:
                traces[sample.group_id].add(sample.trace_id)
        for row in run.rollouts():
            traces[row["group_id"]].add(row["trace_id"])
        assert len(traces) == 8
        assert all(len(found) == 1 for found in traces.values())
        assert len(set.union(*traces.values())) == 8  # two groups never share one

        for call in run.scorers.calls:  # a call of several groups carries the trace of each
            groups = {name.rpartition(".")[0] for name in call.sample_ids}
            assert call.traces == set.union(*(traces[group] for group in groups))
        assert any(call.linked for call in run.scorers.calls)

        job = run.events("summary")[0]["job_trace_id"]
        assert job not in set.union(*traces.values())
        spans = run.events("span")
        roots = [span for span in spans if span["name"] == "group"]
        assert {span["attributes"]["group_id"]: {span["trace_id"]} for span in roots} == traces
        assert all(job in {link["trace_id"] for link in span["links"]} for span in roots)


async def test_o46_retries_keep_the_trace_with_a_new_span(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=2) as run:
        run.engine.faults.plan("503", "g0000001.0", times=2)
        assert await run.run() == 0, run.error()
        parents = [r.headers["traceparent"] for r in run.samples() if ".g0000001.0." in r.request_id]
        assert len(parents) == len(set(parents)) == 3
        assert len({trace_of(parent) for parent in parents}) == 1
        known = {span["span_id"] for span in run.events("span")}
        assert {parent.split("-")[2] for parent in parents} <= known


async def test_o46_a_sample_can_be_followed_to_its_update(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=8) as run:
        assert await run.run() == 0, run.error()
        spans = run.events("span")
        steps = {span["attributes"]["step"]: span for span in spans if span["name"] == "optimizer_step"}
        for row in run.rollouts():
            step = steps[row["step"]]
            assert row["trace_id"] in {link["trace_id"] for link in step["links"]}
            assert row["group_id"] in step["attributes"]["groups"]
            assert step["attributes"]["policy_version"] == f"{run.run_dir.name}/0/{row['step']}"
            (root,) = [s for s in spans if s["name"] == "group" and s["trace_id"] == row["trace_id"]]
            assert root["attributes"]["row_id"] == row["row_id"]
            assert root["attributes"]["rl.step"] == row["step"]
        names = {span["name"] for span in spans if span["trace_id"] == run.rollouts()[0]["trace_id"]}
        assert {"group", "rollout", "generate", "reward", "reference", "buffer"} <= names


async def test_o46_a_resumed_group_keeps_its_trace(tmp_path: Path) -> None:
    async with FakeRun(tmp_path, prompts=16, token_s=0.003, pipeline={"max_staleness": 2}) as run:
        process = await run.spawn(TRACEPARENT=TRACEPARENT)
        await run.until(lambda: len(run.updates) >= 3, "three updates")
        process.kill()
        await process.wait()
        assert await run.run(resume=True) == 0, run.error()
        traces: dict[str, set[str]] = defaultdict(set)
        for request in run.samples():
            traces[group_of(request.request_id)].add(trace_of(request.headers["traceparent"]))
        assert all(len(found) == 1 for found in traces.values())
        assert {context.job_trace_id for context in run.trainer.contexts} == {JOB}
