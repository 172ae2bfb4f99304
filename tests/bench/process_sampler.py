"""CPU time, memory and open files of another process, read from ``/proc`` while it runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Sampler(threading.Thread):
    """CPU seconds, memory and open files of a process, twice a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.rows: list[tuple[float, float, int, int]] = []

    def run(self) -> None:
        """Samples until the process has ended."""
        while True:
            try:
                files = sum(1 for _ in Path(f"/proc/{self._pid}/fd").iterdir())
                self.rows.append((time.time(), _cpu(self._pid), _memory(self._pid), files))
            except (OSError, StopIteration):
                return
            time.sleep(0.5)

    def cpu_at(self, moment: float) -> float:
        """CPU seconds at a time, between two samples in proportion."""
        before = max((row for row in self.rows if row[0] <= moment), default=self.rows[0])
        after = min((row for row in self.rows if row[0] > moment), default=self.rows[-1])
        if after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])
