"""The process of one job: started, found again after a restart, told to end, and what it left behind.

A job runs as ``python -m orchestrator.jobs.keeper``, in a session of its own, so that it outlives the orchestrator that
started it. The keeper writes ``process.json`` when it starts and ``exit.json`` when its command has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nightshift.cli.processes import is_zombie, stat_fields
from nightshift.wire.lease_file import forget_leases

PROCESS, EXIT = "process.json", "exit.json"
_START_TIME = 19  # field 22 of /proc/PID/stat, counted from the state


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process it is; a process id alone may belong to another one after a while.

    Attributes:
        ticks: when the process started, in clock ticks since the machine's start.
        boot: the machine's start.
        token: fencing token that it was started with.
    """

    pid: int
    ticks: int
    boot: str
    token: int

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.boot == boot_id() and _ticks(self.pid) == self.ticks and not is_zombie(self.pid)

    def signal(self, number: int) -> None:
        """Sends a signal, where the process is still this one."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process and its group at once."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def identity(token: int, pid: int | None = None) -> Identity:
    """The identity of a process, by default of this one."""
    pid = os.getpid() if pid is None else pid
    return Identity(pid, _ticks(pid), boot_id(), token)


def start(run_dir: Path, command: Sequence[str], token: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the keeper of a job; its output goes to ``logs/job.log``.

    Raises:
        OSError: no process can be started.
    """
    keeper = [sys.executable, "-P", "-m", "orchestrator.jobs.keeper", str(run_dir), str(token), *command]
    with (run_dir / "logs" / "job.log").open("ab") as log:
        return subprocess.Popen(
            keeper,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            cwd=run_dir,
            start_new_session=True,
        )


def forget(run_dir: Path) -> None:
    """Removes what an earlier process wrote about itself."""
    for name in (PROCESS, EXIT):
        (run_dir / name).unlink(missing_ok=True)
    forget_leases(run_dir)


def read_identity(run_dir: Path) -> Identity | None:
    """The process that was started last, whether it runs or not."""
    try:
        return Identity(**json.loads((run_dir / PROCESS).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def exit_code(run_dir: Path, token: int) -> int | None:
    """How the process with this token ended; None where it was killed before it could say so."""
    try:
        found = json.loads((run_dir / EXIT).read_text())
        return int(found["code"]) if found["token"] == token else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(path: Path, content: Mapping[str, object]) -> None:
    """Writes JSON by rename."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content))
    part.replace(path)


def boot_id() -> str:
    """Names the time since the machine was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _ticks(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else -1
