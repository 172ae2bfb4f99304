"""Shared-memory files that killed processes of a run left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Names that DeepSpeed, PyTorch, NCCL and Python's multiprocessing give to their files.
_PREFIXES = ("deepspeed_", "psm_", "torch_", "nccl-", "sem.mp-")

FileId = tuple[int, int]  # device and inode


def snapshot(folder: Path = SHARED_MEMORY) -> set[FileId]:
    """The files that are there now."""
    return {key for _, key in _files(folder)}


def left_behind(before: Iterable[FileId], in_use: Iterable[FileId], folder: Path = SHARED_MEMORY) -> list[Path]:
    """Files of this user that came after ``before``, have the name of a shared-memory file and no living user.

    Other programs of the machine may use the same names: their files are in use, or were there before.
    """
    spared = {*before, *in_use}
    return [path for path, key in _files(folder) if key not in spared and path.name.startswith(_PREFIXES)]


def files_in_use(proc: Path = Path("/proc")) -> set[FileId]:
    """Shared-memory files that a living process has mapped or open."""
    found: set[FileId] = set()
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(str(SHARED_MEMORY)):
                    major, minor = fields[3].split(":")
                    found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(str(SHARED_MEMORY)):
                        status = link.stat()
                        found.add((status.st_dev, status.st_ino))
    return found


def remove(before: Iterable[FileId]) -> list[str]:
    """Removes what the run left behind since ``before``; returns the names."""
    names = []
    for path in left_behind(before, files_in_use()):
        with contextlib.suppress(OSError):
            path.unlink()
            names.append(path.name)
    return names


def _files(folder: Path) -> Iterator[tuple[Path, FileId]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.is_file() and not path.is_symlink() and status.st_uid == os.getuid():
                yield path, (status.st_dev, status.st_ino)
