"""One stored response and its trace through all real parts, rebuilt from what an outside receiver of spans got
(O-46).
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pyarrow.parquet as pq
import pytest

from nightshift.analysis.spans import covered, within
from orchestrator.api.otlp import decode
from tests.fixtures.otlp_receiver import otlp_receiver
from tests.fixtures.tiny_model import build_tiny_model
from tests.integration.run.jobs import run, write_job

pytestmark = pytest.mark.integration
Span = dict[str, Any]


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Span], dict[str, Any]]:
    """All spans of a run as an outside receiver got them, and one row of the stored rollouts."""
    folder = tmp_path_factory.mktemp("run")
    with otlp_receiver() as receiver:
        job = write_job(
            folder,
            build_tiny_model(folder / "model"),
            pipeline={"max_staleness": 1, "deterministic": False, "role_timeout_s": 120},
            tracking={"tensorboard": False, "otlp_endpoint": receiver.url},
            # A group of the tiny model then lasts about a second.
            rollout={"max_response_length": 160, "ignore_eos": True},
        )
        finished = run(job)
        assert finished.code == 0, finished.output
        spans = [span for request in receiver.requests for span in decode(request)]
    rows = [
        row
        for file in sorted((finished.folder / "rollouts").glob("*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]
    return spans, next(row for row in rows if row["step"] == 2)


def one(spans: list[Span], name: str, **wanted: Any) -> Span:
    """The only span of a name with these fields or attributes."""
    found = [
        span
        for span in spans
        if span["name"] == name and all(span.get(k, span["attributes"].get(k)) == v for k, v in wanted.items())
    ]
    assert len(found) == 1, f"{len(found)} spans {name} with {wanted}"
    return found[0]


def walk(spans: list[Span], row: dict[str, Any]) -> list[str]:
    """Follows a response from its prompt to the weights that it made; the names on the way.

    Raises:
        AssertionError: a hop is missing.
    """
    trace_id = row["trace_id"]
    own = [span for span in spans if span["trace_id"] == trace_id]
    job = one(spans, "job")
    group = one(own, "group", group_id=row["group_id"])
    assert {link["trace_id"] for link in group["links"]} == {job["trace_id"]}
    rollout = one(own, "rollout", parent_id=group["span_id"])
    generate = one(own, "generate", sample_id=row["sample_id"], parent_id=rollout["span_id"])
    # The attempt that was answered: the first, or one below a span of its own.
    attempts = {generate["span_id"], *(s["span_id"] for s in own if s["parent_id"] == generate["span_id"])}
    engines = [span for span in own if span["name"] == "llm_request" and span["parent_id"] in attempts]
    assert engines, f"no span llm_request below {row['sample_id']}"
    assert {span["role"] for span in engines} == {"rollout"}
    reward = one(own, "reward", parent_id=group["span_id"])
    reference = one(own, "reference", parent_id=group["span_id"])
    names = ["group", "rollout", "generate", "llm_request", "reward", "reference", "buffer"]
    # A scorer's call serves several groups: it is below one of them, and linked to the others.
    for call, work in ((reward, "reward.score"), (reference, "reference.log_probs")):
        served = [
            span
            for span in spans
            if span["name"] == work
            and (span["parent_id"] == call["span_id"] or call["span_id"] in {k["span_id"] for k in span["links"]})
        ]
        assert len(served) == 1, f"{len(served)} spans {work} belong to the group's call"
        names.append(work)
    one(own, "buffer", parent_id=group["span_id"])
    step = one(spans, "optimizer_step", step=row["step"])
    publish = [
        span for span in spans if span["name"] == "publish" and trace_id in {k["trace_id"] for k in span["links"]}
    ]
    for span in (step, *publish):
        assert (span["trace_id"], span["parent_id"]) == (job["trace_id"], job["span_id"])
        assert trace_id in {link["trace_id"] for link in span["links"]}
    assert one(spans, "trainer.update", parent_id=step["span_id"])["role"] == "trainer"
    assert len(publish) == 1
    one(spans, "trainer.publish", parent_id=publish[0]["span_id"])
    return [*names, "optimizer_step", "trainer.update", "publish", "trainer.publish"]


def test_o46_a_stored_response_is_followed_through_every_role(received: tuple[list[Span], dict[str, Any]]) -> None:
    spans, row = received
    assert len(walk(spans, row)) == 13


#: Of a group of the tiny model, which lasts about a second, the turns of a busy event loop are more than 5 %.
TURNS_S = 0.15


def gap(stages: list[Span], start: float, end: float) -> float:
    """By how many seconds more of a time are unexplained than may be: a twentieth of it, or the turns of the loop."""
    inside = covered(within([(span["start"], span["end"]) for span in stages], [(start, end)]))
    return (end - start - inside) - max(0.05 * (end - start), TURNS_S)


def journeys(spans: list[Span]) -> list[tuple[float, float]]:
    """The gap of each group that fed a step: in its own time, and on the way to the weights that this step made."""
    found = []
    for group in (span for span in spans if span["name"] == "group"):
        stages = [span for span in spans if span["parent_id"] == group["span_id"]]
        fed = [
            span
            for span in spans
            if span["name"] in ("optimizer_step", "publish")
            and group["trace_id"] in {link["trace_id"] for link in span["links"]}
        ]
        if len(fed) == 2:
            whole = gap([*stages, *fed], group["start"], max(span["end"] for span in fed))
            found.append((gap(stages, group["start"], group["end"]), whole))
    return found


def test_o46_less_than_a_twentieth_of_the_time_is_unexplained(received: tuple[list[Span], dict[str, Any]]) -> None:
    """In the group's own trace, and on the way from its prompt to the new weights: of the median group, since a busy
    machine may hold up the event loop at any one of them."""
    spans, row = received
    own = {span["name"] for span in spans if span["trace_id"] == row["trace_id"]}
    assert {"group", "rollout", "reward", "reference", "buffer"} <= own
    found = journeys(spans)
    assert len(found) == 6, "three steps of two groups"
    for gaps in zip(*found, strict=True):
        assert statistics.median(gaps) < 0, "the stages leave gaps"


def test_o46_what_a_role_did_lies_within_the_call_that_asked_for_it(
    received: tuple[list[Span], dict[str, Any]],
) -> None:
    """All clocks are this machine's: a span that sticks out of its parent has the wrong one."""
    spans, row = received
    by_id = {span["span_id"]: span for span in spans}
    pairs = [(span, by_id[span["parent_id"]]) for span in spans if span["parent_id"] in by_id]
    checked = set()
    for span, parent in pairs:
        if span["trace_id"] == row["trace_id"] or span["name"].startswith("trainer."):
            assert span["trace_id"] == parent["trace_id"]
            assert parent["start"] - 0.05 <= span["start"], (span["name"], parent["name"])
            assert span["end"] <= parent["end"] + 0.05, (span["name"], parent["name"])
            checked.add(span["name"])
    assert {"rollout", "generate", "llm_request", "trainer.update", "trainer.publish"} <= checked


@pytest.mark.parametrize(
    "hop",
    [
        *("group", "rollout", "generate", "llm_request", "reward", "reward.score", "reference"),
        *("reference.log_probs", "buffer", "optimizer_step", "trainer.update", "publish", "trainer.publish"),
    ],
)
def test_o46_a_hop_that_is_not_propagated_is_noticed(received: tuple[list[Span], dict[str, Any]], hop: str) -> None:
    """What a role does without the context of its caller: a trace of its own, and no link."""
    spans, row = received
    cut = copy.deepcopy(spans)
    for span in cut:
        if span["name"] == hop:
            span |= {"parent_id": None, "links": []}
            if hop != "group":
                span["trace_id"] = "f" * 32
    with pytest.raises(AssertionError):
        walk(cut, row)
