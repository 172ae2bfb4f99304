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
STEPS = 6


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
            trainer={"total_steps": STEPS},
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
    one(own, "issue", parent_id=group["span_id"])
    rollout = one(own, "rollout", parent_id=group["span_id"])
    generate = one(own, "generate", sample_id=row["sample_id"], parent_id=rollout["span_id"])
    # The attempt that was answered: the first, or one below a span of its own.
    attempts = {generate["span_id"], *(s["span_id"] for s in own if s["parent_id"] == generate["span_id"])}
    engines = [span for span in own if span["name"] == "llm_request" and span["parent_id"] in attempts]
    assert engines, f"no span llm_request below {row['sample_id']}"
    assert {span["role"] for span in engines} == {"rollout"}
    reward = one(own, "reward", parent_id=group["span_id"])
    reference = one(own, "reference", parent_id=group["span_id"])
    names = ["group", "issue", "rollout", "generate", "llm_request", "reward", "reference", "keep", "buffer"]
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
    for wait in ("keep", "buffer"):
        one(own, wait, parent_id=group["span_id"])
    step = one(spans, "optimizer_step", step=row["step"])
    stored = one(spans, "store_rollouts", step=row["step"])
    published = [span for span in linked(spans, trace_id) if span["name"] == "publish"]
    assert len(published) == 1, f"{len(published)} spans publish are linked to the group"
    publish = published[0]
    for span in (step, stored, publish):
        assert (span["trace_id"], span["parent_id"]) == (job["trace_id"], job["span_id"])
        assert trace_id in {link["trace_id"] for link in span["links"]}
    assert one(spans, "trainer.update", parent_id=step["span_id"])["role"] == "trainer"
    one(spans, "trainer.publish", parent_id=publish["span_id"])
    # The servers get the very weights that this step made.
    assert publish["attributes"]["policy_version"] == step["attributes"]["policy_version"]
    push = one(spans, "push_weights", policy_version=publish["attributes"]["policy_version"])
    assert (push["trace_id"], push["parent_id"]) == (job["trace_id"], job["span_id"])
    return [*names, "optimizer_step", "trainer.update", "store_rollouts", "publish", "trainer.publish", "push_weights"]


def linked(spans: list[Span], trace_id: str) -> list[Span]:
    """The spans of the job that are linked to a group's trace."""
    return [span for span in spans if trace_id in {link["trace_id"] for link in span["links"]}]


def test_o46_a_stored_response_is_followed_through_every_role(received: tuple[list[Span], dict[str, Any]]) -> None:
    spans, row = received
    assert len(walk(spans, row)) == 17


def unexplained(stages: list[Span], start: float, end: float) -> float:
    """Share of a time that lies in none of the stages."""
    inside = covered(within([(span["start"], span["end"]) for span in stages], [(start, end)]))
    return 1.0 - inside / (end - start)


def journeys(spans: list[Span]) -> list[tuple[float, float]]:
    """What is unexplained of each group that fed a step: of its own time, and of the time from its prompt to the
    publication of the weights that it helped to make."""
    found = []
    for group in (span for span in spans if span["name"] == "group"):
        stages = [span for span in spans if span["parent_id"] == group["span_id"]]
        job = [span for span in linked(spans, group["trace_id"]) if span["role"] in ("orchestrator", "trainer")]
        published = [span["end"] for span in job if span["name"] == "publish"]
        if published:
            own = unexplained(stages, group["start"], group["end"])
            found.append((own, unexplained([*stages, *job], group["start"], published[0])))
    return found


def test_o46_less_than_a_twentieth_of_the_time_is_unexplained(received: tuple[list[Span], dict[str, Any]]) -> None:
    """Of the median group, since a busy machine may hold up the event loop at any one of them; shares, which hold on a
    slow machine too."""
    spans, _ = received
    found = journeys(spans)
    assert len(found) == 2 * STEPS, "two groups in each step"
    for shares in zip(*found, strict=True):
        assert statistics.median(shares) < 0.05, f"unexplained: {[f'{share:.1%}' for share in shares]}"


@pytest.mark.parametrize("stage", ["rollout", "buffer"])
def test_o46_a_stage_without_its_span_is_noticed(received: tuple[list[Span], dict[str, Any]], stage: str) -> None:
    spans, _ = received
    shares = [own for own, _ in journeys([span for span in spans if span["name"] != stage])]
    assert statistics.median(shares) > 0.05


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
        *("group", "issue", "rollout", "generate", "llm_request", "reward", "reward.score", "reference"),
        *("reference.log_probs", "keep", "buffer", "optimizer_step", "trainer.update", "store_rollouts"),
        *("publish", "trainer.publish", "push_weights"),
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
