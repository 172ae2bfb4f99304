"""Groups between start and end of their step: counts that no order of events leaves wrong."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN

from nightshift.algorithms.staleness import GroupAge
from nightshift.data import Prompt
from nightshift.wire.experience import VersionSpan
from orchestrator.runner.batch import whole_passes
from orchestrator.runner.group import Group
from orchestrator.runner.in_flight import PipelineState
from tests.fixtures.samples import make_sample


def make_group(index: int, started: int, tokens: int) -> Group:
    prompt = Prompt(f"rows:{index}", "hi", np.array([1, 5], np.int32), "2", "sums", None)
    sample = make_sample(f"g{index:07d}.0", tokens=tokens)
    sample.versions = [VersionSpan(f"run/0/{started + 1}", 0, tokens)] if tokens else []
    return Group(index, prompt, 0, "a" * 32, started, INVALID_SPAN, samples=[sample])


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "score", "fail", "take", "drop", "close"]), st.integers(0, 9), st.integers(0, 5)
        )
    )
)
def test_counts_and_bytes_follow_any_order_of_events(events: list[tuple[str, int, int]]) -> None:
    state, issued = PipelineState(), 0
    for kind, pick, size in events:
        running, ready = sorted(state.running), sorted(state.ready)
        if kind == "start":
            state.start(make_group(issued, pick, size))
            issued += 1
        elif kind in ("score", "fail") and running:
            group = state.end(running[pick % len(running)])
            if kind == "score":
                state.put(group)
        elif kind == "take" and ready:
            ages = sorted(state.ready_ages())[: 1 + size]
            for group in state.open_with(ages):  # what comes later, like advantages, must not count
                group.samples[0].ref_logprobs = np.zeros(100, np.float32)
        elif kind == "drop" and ready:
            state.remove(ready[pick % len(ready)])
        elif kind == "close":
            state.close()
            assert state.open == {}
        assert state.versions == Counter(group.started_version for group in state.running.values())
        assert {age.order for age in state.ready_ages()} == set(state.ready)
        assert {age.order for age in state.all_ages()} == set(state.ready) | set(state.running)
        assert state.running_up_to(4) == sum(group.started_version <= 4 for group in state.running.values())
        for age in state.ready_ages():
            assert age == GroupAge(state.ready[age.order].oldest_version, age.order)
    state.close()
    for index in list(state.ready):
        state.remove(index)
    assert state.buffered_bytes == 0


def test_parts_fill_passes() -> None:
    assert whole_passes([2, 2, 2], 4) == 2
    assert whole_passes([2], 4) == 0
    assert whole_passes([3, 3, 3], 4) == 3  # no number of them fills passes: all go
    assert whole_passes([3, 0, 1, 2], 4) == 3  # a group of which nothing is usable goes along
    assert whole_passes([], 4) == 0
