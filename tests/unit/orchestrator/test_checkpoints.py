"""Which checkpoints count, and which go (case O-43)."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.runner.checkpoints import MANIFEST, Checkpoints, rotated


@pytest.mark.parametrize(("keep", "left"), [(2, [11, 100]), (None, [9, 10, 11, 100]), (1, [100])])
def test_o43_rotation_is_numeric(keep: int | None, left: list[int]) -> None:
    steps = [9, 10, 11, 100]
    assert [step for step in steps if step not in rotated(steps, keep)] == left


def make(checkpoints: Checkpoints, step: int, *, whole: bool = True) -> None:
    checkpoints.state_dir(step).mkdir(parents=True)
    checkpoints.export_dir(step).mkdir(parents=True)
    if whole:
        (checkpoints.state_dir(step) / MANIFEST).write_text('{"lineage": 0}')


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
