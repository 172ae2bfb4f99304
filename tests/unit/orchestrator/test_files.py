"""What a run keeps in its folder: experience of finished groups, metrics, stored rollouts, state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

import orchestrator.runner.spool
from nightshift.wire.experience import pack_samples
from nightshift.wire.version import Lineage
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.runner.rollouts import drop_rollouts_after, write_rollouts
from orchestrator.runner.spool import Spool
from orchestrator.runner.tracking import Tracking
from orchestrator.store.state import RunState, StateStore
from tests.fixtures.samples import make_sample


def test_a_kept_group_comes_back_as_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    sample = make_sample("g7.0", logprobs=[-0.1, -0.2], ref_logprobs=[-0.3, -0.4], reward=0.5)
    spool.put(7, [sample])
    (back,) = spool.get(7) or []
    assert back.logprobs.tobytes() == sample.logprobs.tobytes()
    assert back.response_ids.tolist() == sample.response_ids.tolist()
    assert (back.reward, back.versions) == (0.5, sample.versions)
    assert spool.indices() == [7]
    spool.remove([7, 8])
    assert spool.get(7) is None


def test_a_group_that_is_not_whole_is_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(1, [make_sample("g1.0")])
    spool.put(2, [make_sample("g2.0")])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    assert spool.get(2) is None
    again = Spool(tmp_path)
    assert again.indices() == [1]
    assert again.get(1) is not None
    path.write_bytes(path.read_bytes()[:5])
    assert Spool(tmp_path).indices() == []
    assert not list(tmp_path.iterdir())


def test_a_segment_that_is_cut_or_altered_anywhere_gives_back_what_is_whole_and_nothing_else(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for index in range(3):
        spool.put(index, [make_sample(f"g{index}.0", reward=0.5)])
    spool.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    kept = {index: pack_samples(spool.get(index) or []) for index in range(3)}
    third = len(whole) // 3
    spoilt = [whole[:cut] for cut in range(0, len(whole), 7)]
    spoilt += [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    spoilt += [whole + bytes(4096), whole[:third] + bytes(third) + whole[2 * third :], bytes(len(whole))]
    for data in spoilt:
        path.write_bytes(data)
        again = Spool(tmp_path)
        found = {index: samples for index in again.indices() if (samples := again.get(index)) is not None}
        assert {index: pack_samples(samples) for index, samples in found.items()}.items() <= kept.items()


def test_another_process_finds_what_is_kept_and_writes_elsewhere(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    for index in range(3):
        first.put(index, [make_sample(f"g{index}.0", reward=0.25)])
    first.put(1, [make_sample("g1.0", reward=0.5)])
    second = Spool(tmp_path)  # the first one was killed
    assert second.indices() == [0, 1, 2]
    assert [sample.reward for sample in second.get(1) or []] == [0.5]
    second.put(2, [make_sample("g2.0", reward=0.75)])
    assert len(list(tmp_path.iterdir())) == 2
    second.remove([0, 1])
    assert len(list(tmp_path.iterdir())) == 1
    second.close()
    third = Spool(tmp_path)
    assert [sample.reward for sample in third.get(2) or []] == [0.75]
    third.remove([2])
    assert not list(tmp_path.iterdir())


@given(st.lists(st.tuples(st.sampled_from(["put", "remove", "kill", "end"]), st.integers(0, 5)), max_size=300))
@settings(max_examples=50, deadline=None)
def test_whatever_happens_nothing_that_is_kept_is_lost(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = Spool(folder)
    kept: dict[int, float] = {}
    with mock.patch.object(orchestrator.runner.spool, "_MOST_GROUPS", 3):
        for at, (what, index) in enumerate(events):
            if what == "put":
                spool.put(index, [make_sample("g0.0", reward=float(at))])
                kept[index] = float(at)
            elif what == "remove":
                spool.remove([index])
                kept.pop(index, None)
            else:
                if what == "end":
                    spool.close()
                spool = Spool(folder)
                spool.remove(set(spool.indices()) - kept.keys())  # the ledger knows that they are over
            assert set(spool.indices()) == kept.keys()
            assert {i: samples[0].reward for i in kept if (samples := spool.get(i))} == kept
    spool.remove(list(kept))
    spool.close()
    assert not list(folder.iterdir())


def test_o45_going_back_removes_the_lines_of_later_steps(tmp_path: Path) -> None:
    tracking = Tracking(tmp_path)
    tracking.drop_after(0)
    for step in (1, 2, 3):
        tracking.log(step, {"reward/mean": 0.5, "loss": float("nan")})
    tracking.log(2, {"eval/score": 1.0}, kind="evaluation")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ki')  # killed while it wrote
    assert tracking.logged("train") == {1, 2, 3}
    tracking.drop_after(2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [(1, "train"), (2, "train"), (2, "evaluation")]
    assert lines[0]["metrics"] == {"reward/mean": 0.5, "loss": None}
    assert tracking.logged("evaluation") == {2}


def test_rollouts_of_later_steps_go_with_them(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write_rollouts(tmp_path, step, [{"step": step, "sample_id": "g0.0"}])
    drop_rollouts_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.parquet", "step_000002.parquet"]
    assert pq.read_table(tmp_path / "step_000002.parquet").to_pylist()[0]["sample_id"] == "g0.0"


def test_rollouts_keep_their_arrays_and_what_is_missing(tmp_path: Path) -> None:
    ids, empty = np.arange(5, dtype=np.int32), np.zeros(0, np.float32)
    rows: list[dict[str, Any]] = [
        {
            "sample_id": "g0.0",
            "response_ids": ids,
            "ref_logprobs": empty,
            "versions": ["a", "b"],
            "version_starts": [0, 2],
        },
        {"sample_id": "g0.1", "response_ids": ids[:2], "ref_logprobs": None, "reward": 0.5},
    ]
    first, second = pq.read_table(write_rollouts(tmp_path, 1, rows)).to_pylist()
    assert (first["response_ids"], second["response_ids"]) == ([0, 1, 2, 3, 4], [0, 1])
    assert (first["ref_logprobs"], second["ref_logprobs"]) == ([], None)
    assert (first["versions"], first["version_starts"], second["versions"]) == (["a", "b"], [0, 2], None)
    assert (first["reward"], second["reward"]) == (None, 0.5)
    assert pq.read_table(write_rollouts(tmp_path, 2, [])).num_rows == 0


def make_store(tmp_path: Path) -> StateStore:
    return StateStore(f"sqlite:///{tmp_path / 'state.db'}")


def test_groups_and_lineage_survive_the_process(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    lineage = Lineage("run", 2, ((0, 7), (1, 9)))
    records = [GroupRecord(index, index % 3, 0, f"{index:032x}") for index in range(4)]
    store.save_run(RunState(lineage, "f" * 32, "running"))
    store.save_groups("run", records)
    trained = GroupRecord(1, 1, 0, f"{1:032x}", GroupState.TRAINED, 3, 2, "", "run/1/1", "run/1/2")
    store.save_groups("run", [trained])
    store.close()
    state, found = make_store(tmp_path).load("run")
    assert state == RunState(lineage, "f" * 32, "running")
    assert found == [records[0], trained, *records[2:]]
    assert make_store(tmp_path).load("other") == (None, [])


def test_groups_are_written_all_or_none(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_groups("run", [GroupRecord(0, 0, 0, "a" * 32)])
    with pytest.raises(IntegrityError):
        store.save_groups("run", [GroupRecord(1, 0, 0, "b" * 32), GroupRecord(1, 0, 0, "c" * 32)])
    assert [record.index for record in store.load("run")[1]] == [0]
