"""Shared-memory files that a run left behind."""

import mmap
import os
import uuid
from pathlib import Path

from services.agent import leftovers


def test_only_new_files_with_known_names_and_no_user_are_left_behind(tmp_path):
    (tmp_path / "psm_before").touch()
    before = leftovers.snapshot(tmp_path)
    for name in ("psm_new", "deepspeed_allreduce_buffer_1_0", "torch_1_2", "someone_elses", "nightshift-run"):
        (tmp_path / name).touch()
    (tmp_path / "psm_folder").mkdir()
    (tmp_path / "psm_link").symlink_to(tmp_path / "psm_new")
    used = tmp_path / "psm_used"
    used.touch()
    in_use = {(used.stat().st_dev, used.stat().st_ino)}
    found = [path.name for path in leftovers.left_behind(before, in_use, tmp_path)]
    assert found == ["deepspeed_allreduce_buffer_1_0", "psm_new", "torch_1_2"]


def test_a_file_that_a_process_has_mapped_or_open_is_in_use():
    path = leftovers.SHARED_MEMORY / f"psm_test_{uuid.uuid4().hex}"
    path.write_bytes(b"x" * 4096)
    key = (path.stat().st_dev, path.stat().st_ino)
    try:
        assert key not in leftovers.files_in_use()
        descriptor = os.open(path, os.O_RDWR)
        assert key in leftovers.files_in_use()
        mapping = mmap.mmap(descriptor, 4096)
        os.close(descriptor)
        assert key in leftovers.files_in_use()
        mapping.close()
        assert key not in leftovers.files_in_use()
        assert path in leftovers.left_behind(set(), leftovers.files_in_use())
    finally:
        path.unlink()


def test_an_absent_folder_holds_nothing(tmp_path):
    assert leftovers.snapshot(tmp_path / "absent") == set()


def test_only_folders_of_ended_processes_are_stale(tmp_path):
    here = Path("/proc/self/ns/pid").readlink()
    owners = {
        "ns-dead": f"1 0 {here}",
        "ns-reused": f"{os.getpid()} 1 {here}",
        "ns-elsewhere": "1 0 pid:[1]",
        "ns-odd": "what",
        "other": f"1 0 {here}",
    }
    for name, owner in owners.items():
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / ".owner").write_text(owner)
    (tmp_path / "ns-unmarked").mkdir()
    (tmp_path / "ns-mine").mkdir()
    leftovers.mark(tmp_path / "ns-mine")
    (tmp_path / "ns-link").symlink_to(tmp_path / "other")
    assert leftovers.remove_stale(tmp_path, "ns-*") == ["ns-dead", "ns-reused"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ns-elsewhere",
        "ns-link",
        "ns-mine",
        "ns-odd",
        "ns-unmarked",
        "other",
    ]
