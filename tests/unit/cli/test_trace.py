"""Timelines of prompt groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.cli.main import main
from nightshift.cli.trace import lines_of, timeline
from nightshift.wire.events import EventLog

GROUP, JOB = "a" * 32, "b" * 32


def span(name: str, start: float, end: float, span_id: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "kind": "span",
        "name": name,
        "role": "rollout",
        "trace_id": GROUP,
        "span_id": span_id,
        "parent_id": parent,
        "links": [],
        "start": start,
        "end": end,
        "attributes": {},
        "status": "ok",
        **more,
    }


SPANS = [
    span("update", 14.0, 16.0, "u", None, trace_id=JOB, role="trainer", links=[{"trace_id": GROUP, "span_id": "g"}]),
    span("reward", 12.0, 12.5, "r", "g", role="reward"),
    span("group", 10.0, 13.0, "g"),
    span("generate", 10.0, 11.5, "e", "g"),
    span("llm_request", 10.2, 11.4, "v", "e"),
    span("other group", 10.0, 13.0, "x", None, trace_id="c" * 32),
]


def test_timeline_is_indented_by_parent_with_gaps_and_linked_spans() -> None:
    shape = [
        (entry.kind, entry.name, entry.depth, round(entry.offset, 3), round(entry.seconds, 3))
        for entry in timeline(SPANS, GROUP)
    ]
    assert shape == [
        ("span", "group", 0, 0.0, 3.0),
        ("span", "generate", 1, 0.0, 1.5),
        ("gap", "unexplained", 2, 0.0, 0.2),
        ("span", "llm_request", 2, 0.2, 1.2),
        ("gap", "unexplained", 2, 1.4, 0.1),
        ("gap", "unexplained", 1, 1.5, 0.5),
        ("span", "reward", 1, 2.0, 0.5),
        ("gap", "unexplained", 1, 2.5, 0.5),
        ("gap", "unexplained", 0, 3.0, 1.0),
        ("linked", "update", 0, 4.0, 2.0),
    ]


def test_lines_hold_offset_duration_name_and_role() -> None:
    lines = lines_of(timeline(SPANS, GROUP))
    assert lines[1].split() == ["+0", "ms", "1.5", "s", "generate", "rollout"]
    assert lines[-1].split()[-3:] == ["->", "update", "trainer"]


def test_span_whose_parent_never_ended_is_a_root() -> None:
    assert [entry.depth for entry in timeline([span("a", 1, 2, "a", "gone"), span("b", 1, 1.5, "b", "a")], GROUP)] == [
        0,
        1,
        1,
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 9)), max_size=10))
def test_every_span_appears_once_and_gaps_overlap_no_sibling(raw: list[tuple[int, int, int]]) -> None:
    """Parents may be missing, later than their children, or shorter than them; only lower numbers are parents."""
    spans = [
        span(str(n), start, start + length, str(n), str(parent) if parent < n else None)
        for n, (start, length, parent) in enumerate(raw)
    ]
    entries = timeline(spans, GROUP)
    assert sorted(entry.name for entry in entries if entry.kind == "span") == sorted(str(n) for n in range(len(raw)))
    assert all(entry.seconds > 0 for entry in entries if entry.kind == "gap")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first-1"
    folder.mkdir(parents=True)
    with EventLog(folder / "events.jsonl", "first-1") as log:
        for one in SPANS:
            log.append(**one)
    return tmp_path / "runs"


def test_o46_trace_is_found_by_the_beginning_of_its_id(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "aaaa", "--runs-dir", str(runs)]) == 0
    assert "llm_request" in capsys.readouterr().out
    assert main(["trace", GROUP, "--run", "first", "--runs-dir", str(runs), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trace_id"] == GROUP
    assert answer["entries"][-1]["trace_id"] == JOB


def test_unknown_trace_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "dddd", "--runs-dir", str(runs)]) == 2
    assert "there is no trace 'dddd'" in capsys.readouterr().err
