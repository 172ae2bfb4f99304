"""Shared memory files that nobody uses any more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from nightshift.cli.shared_memory import Segments


def test_only_what_the_run_used_and_nobody_uses_any_more_is_removed(tmp_path: Path) -> None:
    for name in ("psm_open", "psm_mapped", "psm_kept", "psm_of_another_run", "mine"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    segments = Segments(tmp_path)
    kept = os.open(tmp_path / "psm_kept", os.O_RDWR)
    with (tmp_path / "psm_open").open("rb"), (tmp_path / "mine").open("rb"):
        fd = os.open(tmp_path / "psm_mapped", os.O_RDWR)
        with mmap.mmap(fd, 4096):
            os.close(fd)
            segments.look([os.getpid()])
            assert segments.remove_abandoned() == []
    assert segments.remove_abandoned() == ["psm_mapped", "psm_open"]
    os.close(kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "psm_kept", "psm_of_another_run"]
    assert segments.remove_abandoned() == ["psm_kept"]


def test_absent_folder_and_process_hold_nothing(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "none")
    segments.look([2**22 + 1])
    assert segments.remove_abandoned() == []
