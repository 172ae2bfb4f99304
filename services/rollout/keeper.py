"""Parent of a server's processes: nothing of them outlives it, and it does not outlive its own parent.

    python keeper.py --parent PID [--cores 0,1] [--grace S] -- COMMAND...

It stays beside the command for its whole life, as the leader of their process group. When the command ends, or when the
keeper is told to end by SIGTERM (which the kernel also sends when the parent dies), it ends every process that came
from the command: SIGTERM first, SIGKILL after the grace. Its exit code is the command's, 128 + n after signal n.

Standard library only, and single-threaded: it runs without the package and costs little memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_ENDINGS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def die_with_parent(number: int) -> None:
    """Asks the kernel for signal ``number`` when the thread that started this process ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the new parent of descendants whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Ids of all living processes below ``pid``; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything: fields are counted from the last bracket.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def send(pids: list[int], number: int) -> None:
    """Sends a signal to processes that may be gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_descendants(grace: float) -> bool:
    """Ends every process below this one: SIGTERM, then SIGKILL after ``grace`` seconds; True if none is left."""
    send(descendants(os.getpid()), signal.SIGTERM)
    if _wait_gone(grace):
        return True
    for _ in range(20):  # again and again: a process may start another one while it is being killed
        send(descendants(os.getpid()), signal.SIGKILL)
        if _wait_gone(0.5):
            return True
    return False


def _wait_gone(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while descendants(os.getpid()):
        if time.monotonic() > deadline:
            return False
        _reap()
        time.sleep(0.05)
    _reap()  # or they would stay in the process table until this process has ended too
    return True


def _reap() -> dict[int, int]:
    """Collects ended children: pid to exit code."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _prepare_command(keeper: int) -> None:
    """Runs in the command's process before it starts."""
    die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if os.getppid() != keeper:
        os._exit(1)


def main(arguments: list[str]) -> int:
    """Runs the command; see the module's text."""
    parser = argparse.ArgumentParser(prog="keeper")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)

    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDINGS, signal.SIGCHLD})
    die_with_parent(signal.SIGTERM)
    if os.getppid() != options.parent:  # it died before the line above
        return 1
    adopt_orphans()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})

    keeper = os.getpid()
    # Safe although it is called between fork and exec: this process has one thread.
    command = subprocess.Popen(options.command, preexec_fn=lambda: _prepare_command(keeper))
    code: int | None = None
    while code is None:
        info = signal.sigwaitinfo({*_ENDINGS, signal.SIGCHLD})
        if info.si_signo in _ENDINGS:
            break
        code = _reap().get(command.pid)
    if code is None:
        # The command first: it has an orderly way of ending its own children.
        send([command.pid], signal.SIGTERM)
        deadline = time.monotonic() + options.grace
        while code is None and time.monotonic() < deadline:
            time.sleep(0.05)
            code = _reap().get(command.pid)
    end_descendants(grace=1.0)
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
