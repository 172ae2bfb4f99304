"""Every prompt group has a trace of its own, linked to the job's, from the prompt to the gradient (case O-46)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from nightshift.analysis.spans import covered, within
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
        assert {"group", "issue", "rollout", "generate", "reward", "reference", "keep", "buffer"} <= names


async def test_o46_less_than_a_twentieth_of_a_groups_time_is_unexplained(tmp_path: Path) -> None:
    """The runner's own part of it, with groups of about a second; tests/integration/run/test_trace.py has the rest."""
    async with FakeRun(tmp_path, prompts=16, token_s=0.05) as run:
        assert await run.run() == 0, run.error()
        spans = run.events("span")
    shares = []
    for group in (span for span in spans if span["name"] == "group"):
        window = (group["start"], group["end"])
        stages = [(span["start"], span["end"]) for span in spans if span["parent_id"] == group["span_id"]]
        shares.append(1.0 - covered(within(stages, [window])) / (window[1] - window[0]))
    assert len(shares) == 16
    assert statistics.median(shares) < 0.05, shares


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


async def test_o46_a_runs_spans_are_one_connected_whole(tmp_path: Path) -> None:
    """From the job to each optimiser step, and by links to every group that fed it: no span stands apart."""
    async with FakeRun(tmp_path, prompts=8, test_prompts=2, trainer={"save_freq": 2, "test_freq": 2}) as run:
        assert await run.run() == 0, run.error()
        spans = {span["span_id"]: span for span in run.events("span")}
        reached = connected(spans)
        assert {span["name"] for key, span in spans.items() if key not in reached} == set()
        (job,) = [span for span in spans.values() if span["name"] == "job"]
        for span in spans.values():
            if span["name"] in (
                *(
                    "optimizer_step",
                    "store_rollouts",
                    "await_push",
                    "publish",
                    "push_weights",
                    "checkpoint",
                    "evaluate",
                ),
            ):
                assert span["parent_id"] == job["span_id"]
            if span["name"] in ("issue", "rollout", "reward", "reference", "keep", "buffer"):
                assert spans[span["parent_id"]]["name"] == "group"
            if span["name"] == "generate" and ".eval" not in str(span["attributes"].get("sample_id")):
                assert spans[span["parent_id"]]["name"] == "rollout"
            parent = spans.get(span["parent_id"] or "")
            if parent is not None:
                assert parent["trace_id"] == span["trace_id"]
                assert span["start"] >= parent["start"] - 0.001
        table = (Path(__file__).parents[2] / "docs/observability.md").read_text()
        used = {key for span in spans.values() for key in span["attributes"]}
        assert {key for key in used if f"`{key}`" not in table} == set(), "attributes that no table documents"
        trained = {group for span in spans.values() if span["name"] == "optimizer_step" for group in linked(span)}
        groups = {span["trace_id"] for span in spans.values() if span["name"] == "group"}
        assert trained == groups


@pytest.mark.parametrize("broken", ["parent", "link"])
async def test_o46_a_hop_that_is_not_propagated_is_noticed(tmp_path: Path, broken: str) -> None:
    async with FakeRun(tmp_path, prompts=4) as run:
        assert await run.run() == 0, run.error()
        spans = {span["span_id"]: dict(span) for span in run.events("span")}
        one = next(s for s in spans.values() if s["name"] == ("rollout" if broken == "parent" else "group"))
        if broken == "parent":
            one |= {"parent_id": None, "trace_id": "f" * 32}
        else:
            for span in spans.values():
                span["links"] = [link for link in span["links"] if one["trace_id"] not in link["trace_id"]]
            one["links"] = []
        assert len(connected(spans)) < len(spans)


def connected(spans: dict[str, dict[str, object]]) -> set[str]:
    """Ids of the spans that can be reached from the job's, by parents and links in either direction."""
    edges: dict[str, set[str]] = defaultdict(set)
    for key, span in spans.items():
        others = [span["parent_id"], *(link["span_id"] for link in span["links"])]  # type: ignore[attr-defined]
        for other in others:
            if other in spans:
                edges[key].add(str(other))
                edges[str(other)].add(key)
    start = next(key for key, span in spans.items() if span["name"] == "job")
    reached, waiting = {start}, [start]
    while waiting:
        for other in edges[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached


def linked(span: dict[str, object]) -> set[str]:
    return {link["trace_id"] for link in span["links"]}  # type: ignore[attr-defined]


async def test_o46_with_a_share_of_traces_failures_are_stored_and_metrics_count_all(tmp_path: Path) -> None:
    settings = {"tracking": {"tensorboard": False, "trace_share": 0.0}, "resources": {"ports": {"metrics": 0}}}
    async with FakeRun(tmp_path, prompts=12, **settings) as run:
        run.engine.faults.plan("503", "g0000003.0", times=1)
        assert await run.run() == 0, run.error()
        roots = {span["attributes"]["group_id"] for span in run.events("span") if span["name"] == "group"}
        assert "g0000003" in roots, "the group with a retry is stored"
        assert len(roots) < 12, "and not every other one"
        steps = [span for span in run.events("span") if span["name"] == "optimizer_step"]
        assert len(steps) == 6, "the job's own trace is whole"
