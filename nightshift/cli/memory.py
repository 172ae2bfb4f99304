"""Memory of all processes of a run together, as proportional set sizes (PSS): shared pages are counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nightshift.cli.processes import parents

_INTERVAL_S = 2.0
#: Most of its time that sampling may take: the kernel walks the page tables of each process, 0.2 s for ten GiB, and
#: holds up what these processes map meanwhile.
_SHARE = 0.01
#: Text in a command line -> role; the first that fits.
_ROLES = (
    ("orchestrator.runner", "orchestrator"),
    ("services.agent", "agent"),
    ("vllm", "rollout"),
    ("reward_worker", "reward"),
    ("ServeReplica:reward", "reward"),
    ("ServeReplica:reference", "reference"),
    ("ServeReplica:teacher", "teacher"),
    ("ServeReplica:critic", "critic"),
    ("reference", "reference"),
    ("reward", "reward"),
    ("trainer", "trainer"),
    ("ray::", "ray"),
    ("gcs_server", "ray"),
    ("raylet", "ray"),
    ("/ray/", "ray"),
)


def role_of(command: str) -> str | None:
    """The role that a command line belongs to; None where it says nothing (then the parent's role counts)."""
    lower = command.lower()
    return next((role for text, role in _ROLES if text.lower() in lower), None)


def assign_roles(root: int, parent_of: Mapping[int, int], commands: Mapping[int, str]) -> dict[int, str]:
    """Process id -> role, of ``root`` ("cli") and everything below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, []).append(pid)
    roles = {root: "cli"}
    todo = [root]
    while todo:
        parent = todo.pop()
        for pid in children.get(parent, ()):
            if pid not in roles:
                roles[pid] = role_of(commands.get(pid, "")) or ("other" if parent == root else roles[parent])
                todo.append(pid)
    return roles


def pss_bytes(pid: int) -> int:
    """PSS of one process in bytes; 0 where it is gone or may not be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def roles_below(root: int) -> dict[int, str]:
    """Process id -> role now, of a process and everything below it."""
    parent_of = parents()
    return assign_roles(root, parent_of, {pid: _command(pid) for pid in parent_of})


def sample(root: int, store: Path | None = None) -> dict[str, int]:
    """Role -> bytes now.

    Args:
        root: the process that counts, with everything below it.
        store: a folder in memory whose files count too (they belong to no process).
    """
    totals: dict[str, int] = {}
    for pid, role in roles_below(root).items():
        totals[role] = totals.get(role, 0) + pss_bytes(pid)
    if store is not None and (size := _folder_bytes(store)):
        totals["weight store"] = size
    return totals


class PeakMemory:
    """Samples in a thread and keeps the highest total, with its parts at that moment.

    Args:
        take: gives the bytes by role now.
        meanwhile: called each ``interval_s``.
        interval_s: seconds between two samples; more where they take longer than a hundredth of that.
        clock: seconds.
    """

    def __init__(
        self,
        take: Callable[[], Mapping[str, int]],
        meanwhile: Callable[[], None] = lambda: None,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take = take
        self._meanwhile = meanwhile
        self._interval_s = interval_s
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory", daemon=True)
        self.peak: dict[str, int] = {}

    def start(self) -> None:
        """Starts sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Ends sampling; waits for the sample that is being taken."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def look(self) -> float:
        """Takes one sample in; seconds until the next one."""
        began = self._clock()
        totals = self._take()
        took = self._clock() - began
        if sum(totals.values()) > sum(self.peak.values()):
            self.peak = dict(totals)
        return max(self._interval_s, took / _SHARE)

    def report(self) -> dict[str, object]:
        """The fields of the ``memory`` event, in MiB."""
        parts = sorted(self.peak.items(), key=lambda item: -item[1])
        return {
            "peak_mib": round(sum(self.peak.values()) / (1 << 20)),
            "by_role": {role: round(size / (1 << 20)) for role, size in parts},
        }

    def _work(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            self._meanwhile()
            if self._clock() >= due:
                due = self.look() + self._clock()
            self._stop.wait(self._interval_s)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()[:400].replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _folder_bytes(folder: Path) -> int:
    total = 0
    try:
        for file in folder.iterdir():
            total += file.stat().st_blocks * 512
    except OSError:  # made and emptied by others while we look
        pass
    return total
