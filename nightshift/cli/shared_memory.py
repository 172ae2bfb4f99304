"""Shared memory that killed processes leave behind: POSIX segments and semaphores outlive whoever made them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")  # where Linux keeps them
#: Beginnings of the names that Python's multiprocessing, torch, loky and Ray give.
_PREFIXES = ("psm_", "wnsm_", "torch_", "sem.mp-", "sem.loky-", "plasma")


class Segments:
    """Shared memory that the processes of one run were seen to use.

    Names say nothing of who made a segment, and other runs may work on the machine: so only what a process of this run
    had mapped or open is ever removed, and only once no process uses it any more.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Notes what these processes use now."""
        for pid in pids:
            self._seen |= {path for path in _used_by(pid, self._folder) if path.name.startswith(_PREFIXES)}

    def remove_abandoned(self) -> list[str]:
        """Removes what is still there and in no process's use. Returns the names of the removed files."""
        left = {path for path in self._seen if path.exists()}
        if left:
            for process in Path("/proc").iterdir():
                if process.name.isdigit():
                    left -= _used_by(int(process.name), self._folder)
        removed = []
        for path in left:
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
        return sorted(removed)


def _used_by(pid: int, folder: Path) -> set[Path]:
    return set(_mapped(pid, folder)) | set(_open(pid, folder))


def _mapped(pid: int, folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, slash, rest = line.partition(" /")
            if slash and f"/{rest}".startswith(f"{folder}/"):
                yield Path(f"/{rest}".removesuffix(" (deleted)"))


def _open(pid: int, folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = fd.readlink()
                if path.parent == folder:
                    yield path
