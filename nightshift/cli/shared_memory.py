"""Shared memory that killed processes leave behind: POSIX segments and semaphores outlive whoever made them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")  # where Linux keeps them
#: Beginnings of the names that Python's multiprocessing, torch, loky and Ray give.
_PREFIXES = ("psm_", "wnsm_", "torch_", "sem.mp-", "sem.loky-", "plasma")


def remove_abandoned(since: float, folder: Path = FOLDER) -> list[str]:
    """Removes what was made after ``since`` (unix seconds) by this user and is in no process's use any more.

    Returns:
        The names of the removed files.
    """
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(_PREFIXES)]
    except OSError:
        return []
    candidates = []
    for path in found:
        with suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_ctime >= since:
                candidates.append(path)
    if not candidates:
        return []
    used = _in_use(folder)
    removed = []
    for path in candidates:
        if str(path) not in used:
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return sorted(removed)


def _in_use(folder: Path) -> set[str]:
    """Paths below ``folder`` that any process has mapped or open."""
    used: set[str] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                _, slash, rest = line.partition(" /")
                if slash and f"/{rest}".startswith(f"{folder}/"):
                    used.add(f"/{rest}".removesuffix(" (deleted)"))
        with suppress(OSError):
            for fd in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(fd.readlink()))
    return used
