"""The child processes of a run: started in groups of their own, ended by deadline, swept up at the end.

Three things keep a run from leaving anything behind: children ask the kernel for SIGTERM when this process dies,
orphans of children become children of this process, and every process of a run carries the run's id in its environment,
by which the sweep finds it whatever its parent is. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RUN_ID_VARIABLE = "NIGHTSHIFT_RUN_ID"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05
_LIBC = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its children leave behind."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with_parent() -> None:
    # Runs between fork and exec: nothing but the prepared call.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass(slots=True)
class Child:
    """A child process in a session of its own, so that a terminal's Ctrl-C does not reach it."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path | None

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs; minus the signal's number where one ended it."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone: it ends its own children in order."""
        if self.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the whole process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def stop(self, number: int, deadline_s: float, tick: Callable[[], bool] = lambda: False) -> bool:
        """Sends a signal and waits for the end; kills the group after the deadline, or as soon as ``tick`` is true.

        Returns:
            Whether the process ended by itself.
        """
        self.signal(number)
        ended = self.wait(deadline_s, tick) is not None
        self.kill_group()  # also what the process left in its group
        self.process.wait()
        return ended

    def wait(self, deadline_s: float, tick: Callable[[], bool] = lambda: False) -> int | None:
        """Waits for the end: the exit code, or None after the deadline or once ``tick`` is true."""
        until = time.monotonic() + deadline_s
        while (code := self.poll()) is None:
            if tick() or time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
        return code


def start(
    role: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Child:
    """Starts a child; both its outputs go to ``log``, appended, unless ``stdout`` and ``stderr`` say otherwise.

    Call it from the main thread: the kernel sends the parent-death signal when the *thread* that forked ends.
    """
    output = log.open("ab") if log is not None else None
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else output,
            stderr=stderr if stderr is not None else output,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    finally:
        if output is not None:
            output.close()
    return Child(role, process, log)


def processes_of(run_id: str) -> list[int]:
    """Process ids that carry the run's id in their environment, without this process and its ancestors."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    skip = set(_ancestors(os.getpid()))
    found = []
    for pid in _pids():
        if pid in skip:
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if mark in environment.split(b"\0") and not is_zombie(pid):
            found.append(pid)
    return found


def sweep(run_id: str, deadline_s: float) -> list[str]:
    """Ends every process of the run that is still there, waits for it, and collects orphans.

    Returns:
        The command lines of what had to be killed; empty where the run ended in order.
    """
    until = time.monotonic() + deadline_s
    grace = time.monotonic() + min(2.0, deadline_s)  # what is ending by itself needs no kill
    killed: dict[int, str] = {}
    while left := processes_of(run_id):
        if time.monotonic() > grace:
            for pid in left:
                killed.setdefault(pid, command_line(pid))
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        collect_orphans()
        if time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    collect_orphans()
    return list(killed.values())


def collect_orphans() -> None:
    """Reaps ended children that nobody waits for. Call it when no :class:`Child` is waited for any more."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def command_line(pid: int) -> str:
    """The command line of a process, cut to a readable length."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"{pid}: {text[:120]}" if text else str(pid)


def is_zombie(pid: int) -> bool:
    """Whether the process has ended and is only waiting to be collected."""
    fields = stat_fields(pid)
    return not fields or fields[0] in ("Z", "X")


def stat_fields(pid: int) -> list[str]:
    """``/proc/PID/stat`` after the command name: state, parent, ...; empty for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def parents() -> dict[int, int]:
    """Process id -> parent's id, of all processes."""
    return {pid: int(fields[1]) for pid in _pids() if (fields := stat_fields(pid))}


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
