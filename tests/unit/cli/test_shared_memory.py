"""Shared memory files that nobody uses any more."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from nightshift.cli.shared_memory import remove_abandoned


def test_only_new_unused_files_of_known_kinds_are_removed(tmp_path: Path) -> None:
    since = time.time() - 60
    for name in ("psm_gone", "torch_gone", "psm_open", "psm_mapped", "mine"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with (tmp_path / "psm_open").open("rb"):
        fd = os.open(tmp_path / "psm_mapped", os.O_RDWR)
        with mmap.mmap(fd, 4096):
            os.close(fd)
            assert remove_abandoned(time.time() + 60, tmp_path) == []
            assert remove_abandoned(since, tmp_path) == ["psm_gone", "torch_gone"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "psm_mapped", "psm_open"]


def test_absent_folder_holds_nothing(tmp_path: Path) -> None:
    assert remove_abandoned(0.0, tmp_path / "none") == []
