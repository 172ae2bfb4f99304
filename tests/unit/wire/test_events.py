"""events.jsonl: what is written is read back, whatever happens to the writer."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.wire.events import EventLog, follow_events, plain, read_events

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("soon", [False, True])
@given(values=st.lists(json_values, max_size=6))
def test_events_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, soon: bool, values: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    with EventLog(path, "run-1", clock=lambda: 12.5) as log:
        for value in values:
            (log.append_soon if soon else log.append)("step", value=value)
    assert read_events(path) == [
        {"time": 12.5, "kind": "step", "run_id": "run-1", "value": without_nan(value)} for value in values
    ]


@pytest.mark.parametrize("soon", [False, True])
def test_numbers_that_are_not_finite_become_null(tmp_path: Path, soon: bool) -> None:
    with EventLog(tmp_path / "e", "r") as log:
        append = log.append_soon if soon else log.append
        append("step", metrics={"a": float("nan"), "b": np.float32("inf"), "c": np.float64(0.5), "d": np.arange(2)})
    assert read_events(tmp_path / "e")[0]["metrics"] == {"a": None, "b": None, "c": 0.5, "d": [0, 1]}


def test_fields_of_the_log_cannot_be_overwritten(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e", "r") as log:
        with pytest.raises(ValueError, match="run_id"):
            log.append("step", run_id="other")
        with pytest.raises(TypeError, match="bytes"):
            log.append("step", data=b"x")
    assert read_events(tmp_path / "e") == []


def test_absent_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == []


def test_torn_line_spoils_no_other_event(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with EventLog(path, "r") as log:
        log.append("step", step=1)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st')  # a process killed in the middle of a write
    assert [event["step"] for event in read_events(path)] == [1]
    with EventLog(path, "r") as log:
        log.append("step", step=2)
    kinds = [(event["kind"], event.get("step"), event.get("message")) for event in read_events(path)]
    assert kinds == [("step", 1, None), ("warning", None, "e: line 2 is unreadable"), ("step", 2, None)]


def test_writers_in_several_threads_never_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "e"

    def write(writer: int) -> None:
        with EventLog(path, "r") as log:
            for number in range(50):
                log.append("step", writer=writer, number=number, text="x" * 5000)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(path)
    assert len(events) == 200
    for writer in range(4):
        assert [event["number"] for event in events if event["writer"] == writer] == list(range(50))


def test_following_sees_everything_written_before_the_stop(tmp_path: Path) -> None:
    path, stop = tmp_path / "e", threading.Event()
    seen: list[int] = []
    reader = threading.Thread(
        target=lambda: seen.extend(event["step"] for event in follow_events(path, stop.is_set, poll_s=0.001))
    )
    reader.start()
    with EventLog(path, "r") as log:
        for step in range(20):
            log.append("step", step=step)
        stop.set()
    reader.join(timeout=60)
    assert seen == list(range(20))


def test_following_joins_a_line_that_arrives_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "e"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pieces = iter([b'{"kind": "st', b'ep", "step"', b": 7}\n"])

    def stop() -> bool:
        piece = next(pieces, None)
        if piece is not None:
            os.write(fd, piece)
        return piece is None

    assert [event["step"] for event in follow_events(path, stop, poll_s=0)] == [7]
    os.close(fd)


def test_following_starts_at_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with EventLog(path, "r") as log:
        log.append("step", step=1)
        offset = path.stat().st_size
        log.append("step", step=2)
    assert [event["step"] for event in follow_events(path, lambda: True, offset=offset)] == [2]


def test_plain_refuses_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="object"):
        plain({"a": [object()]})
