"""The schedule of a run: written a line a step, read past crashes and steps that were made twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.wire.errors import BadInputError
from nightshift.wire.schedule import SCHEDULE, StepRecord, append_step, read_schedule


def record(step: int, lineage: int = 0) -> StepRecord:
    return StepRecord(
        step=step,
        expect=f"run/{lineage}/{step - 1}",
        version=f"run/{lineage}/{step}",
        attempt=0,
        parts=[["g0000001"], ["g0000000", "g0000002"]],
        versions={"g0000000": ["run/0/0", "run/0/1"], "g0000001": [], "g0000002": ["run/0/1", "run/0/1"]},
        left_out=["g0000001.0"],
        learning_rate=1e-6,
        loss={"aggregation": "token_mean", "total_tokens": 7},
        algorithm={"estimator": "grpo"},
        stepped=True,
        digest="ab" * 32,
        time=12.5,
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        append_step(tmp_path, record(step))
    assert read_schedule(tmp_path) == {step: record(step) for step in (1, 2, 3)}


def test_the_critic_s_own_step_is_kept_and_older_lines_have_none(tmp_path: Path) -> None:
    made = {"learning_rate": 1e-3, "loss": {"policy_loss": "value"}, "left_out": ["g0000002.1"], "digest": "cd" * 32}
    append_step(tmp_path, replace(record(1), critic=made))
    older = record(2).to_dict()
    del older["critic"]
    with (tmp_path / SCHEDULE).open("a") as file:
        file.write(json.dumps(older) + "\n")
    assert [read_schedule(tmp_path)[step].critic for step in (1, 2)] == [made, {}]


def test_half_a_line_hides_no_other(tmp_path: Path) -> None:
    append_step(tmp_path, record(1))
    with (tmp_path / SCHEDULE).open("a") as file:
        file.write('{"step": 2, "exp')
    assert list(read_schedule(tmp_path)) == [1]
    append_step(tmp_path, record(2))
    assert read_schedule(tmp_path) == {1: record(1), 2: record(2)}


def test_only_the_lineage_of_the_weights_counts(tmp_path: Path) -> None:
    for step, lineage in [(1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (4, 1), (2, 2)]:
        append_step(tmp_path, record(step, lineage))
    assert read_schedule(tmp_path) == {1: record(1), 2: record(2, 2)}


def test_a_run_without_steps_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="it has made no step"):
        read_schedule(tmp_path)
    values = replace(record(1)).to_dict()
    del values["digest"]
    with pytest.raises(BadInputError, match="has no field 'digest'"):
        StepRecord.from_dict(values)
