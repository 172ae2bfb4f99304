"""Which checkpoints count, and which go (case O-43)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.runner.checkpoints import BY_CLOCK, MANIFEST, Checkpoints, rotated


@pytest.mark.parametrize(("keep", "left"), [(2, [11, 100]), (None, [9, 10, 11, 100]), (1, [100])])
def test_o43_rotation_is_numeric(keep: int | None, left: list[int]) -> None:
    steps = [9, 10, 11, 100]
    assert [step for step in steps if step not in rotated(steps, keep)] == left


def make(checkpoints: Checkpoints, step: int, *, whole: bool = True, by_clock: bool = False) -> None:
    checkpoints.state_dir(step).mkdir(parents=True)
    checkpoints.export_dir(step).mkdir(parents=True)
    if whole:
        manifest = {"lineage": 0, BY_CLOCK: True} if by_clock else {"lineage": 0}
        (checkpoints.state_dir(step) / MANIFEST).write_text(json.dumps(manifest))


def test_o43_only_whole_checkpoints_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (9, 10, 11):
        make(checkpoints, step)
    make(checkpoints, 12, whole=False)
    assert checkpoints.committed() == [9, 10, 11]
    assert checkpoints.broken() == [checkpoints.state_dir(12)]
    checkpoints.rotate(2)
    assert checkpoints.committed() == [10, 11]
    assert not checkpoints.export_dir(9).exists()


def test_manifests_outlive_their_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    make(checkpoints, 1)
    checkpoints.keep_manifest(1, checkpoints.manifest(1))
    make(checkpoints, 2)  # a crash came between this commit and its copy
    make(checkpoints, 3)
    checkpoints.rotate(1)
    copies = sorted(path.name for path in (tmp_path / "checkpoints" / "manifests").iterdir())
    assert copies == ["0-1.json", "0-2.json"]


@pytest.mark.parametrize("keep", [2, None])
def test_a_checkpoint_of_the_clock_takes_no_place_and_goes_with_the_next(tmp_path: Path, keep: int | None) -> None:
    first = [2, 4] if keep else [1, 2, 4]
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 4):
        make(checkpoints, step)
    make(checkpoints, 3, by_clock=True)
    make(checkpoints, 5, by_clock=True)
    gone = Checkpoints(tmp_path).rotate(keep)  # as after a crash: the folders alone say which are whose
    assert checkpoints.committed() == [*first, 5]
    assert checkpoints.state_dir(3) in gone
    make(checkpoints, 6)
    checkpoints.keep_manifest(6, checkpoints.manifest(6))
    checkpoints.rotate(keep)
    assert checkpoints.committed() == ([4, 6] if keep else [1, 2, 4, 6])
    assert (tmp_path / "checkpoints" / "manifests" / "0-5.json").is_file()


def test_a_step_that_is_made_again_counts_as_what_it_is_now(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    make(checkpoints, 1, by_clock=True)
    checkpoints.rotate(2)
    checkpoints.keep_manifest(1, {"lineage": 1, BY_CLOCK: False})
    make(checkpoints, 2)
    checkpoints.rotate(2)
    assert checkpoints.committed() == [1, 2]
