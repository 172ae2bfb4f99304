"""What killed processes of a run left behind: shared-memory files, and folders of agents that are no more."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Names that DeepSpeed, PyTorch, NCCL and Python's multiprocessing give to their files.
_PREFIXES = ("deepspeed_", "psm_", "torch_", "nccl-", "sem.mp-")

#: In a folder that an agent made: its process id, the start of that process, by which a reused id is told apart, and
#: the namespace that the id belongs to.
_OWNER = ".owner"
_NAMESPACE = str(Path("/proc/self/ns/pid").readlink())

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


def mark(folder: Path) -> None:
    """Says that a folder belongs to this process."""
    (folder / _OWNER).write_text(_process(os.getpid()))


def remove_stale(parent: Path, pattern: str) -> list[str]:
    """Removes marked folders whose process has ended, as an agent that was killed leaves them; returns the names."""
    names = []
    for folder in sorted(parent.glob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            owner = (folder / _OWNER).read_text()
            # An owner of another namespace (a container that shares this folder) cannot be looked up from here.
            if owner.endswith(f" {_NAMESPACE}") and owner != _process(int(owner.split()[0])):
                shutil.rmtree(folder)
                names.append(folder.name)
    return names


def _process(pid: int) -> str:
    """A process as ``pid start namespace``, the start in clock ticks since boot; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]} {_NAMESPACE}"


def _files(folder: Path) -> Iterator[tuple[Path, FileId]]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if path.is_file() and not path.is_symlink() and status.st_uid == os.getuid():
                yield path, (status.st_dev, status.st_ino)
