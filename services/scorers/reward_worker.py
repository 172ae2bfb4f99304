"""One worker process of the reward pool: ``python -m services.scorers.reward_worker path.py:function``.

It reads frames from standard input and writes frames to what was standard output: first ``{"source"}`` is answered by
``{"ready"}`` or ``{"refused", "fix"}``, then each ``{"task", "sample"}`` by ``{"task", "score", "parts", "error_type",
"error", "seconds"}``. User code never sees these pipes: before it is loaded they move to private descriptors,
standard input becomes empty and standard output goes to standard error, so that ``print`` cannot corrupt a message.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nightshift.wire.errors import BadInputError
from services.scorers import frames
from services.scorers.reward_function import RewardFunction

_PR_SET_PDEATHSIG = 1
_CHUNK = 1 << 16


def main() -> None:
    """Loads the function and scores samples until standard input ends."""
    _die_with_parent()
    reference = sys.argv[1]
    read_fd, write_fd = _take_pipes()
    messages = _read(read_fd)
    path, _, name = reference.rpartition(":")
    # argv is user code's too: a script that reads it must not meet the worker's arguments.
    sys.argv = [path]
    try:
        function = RewardFunction(Path(path), name, next(messages)["source"])
    except BadInputError as error:
        _write(write_fd, {"refused": error.message, "fix": error.fix})
        return
    _write(write_fd, {"ready": True})
    for message in messages:
        began = time.perf_counter()
        judgement = function(message["sample"])
        _disarm()
        _write(write_fd, {"task": message["task"], **asdict(judgement), "seconds": time.perf_counter() - began})


def _take_pipes() -> tuple[int, int]:
    """Moves the pipes to descriptors that child processes do not inherit."""
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return read_fd, write_fd


def _read(fd: int) -> Iterator[Any]:
    reader = frames.FrameReader()
    while data := os.read(fd, _CHUNK):
        yield from reader.feed(data)


def _write(fd: int, message: Any) -> None:
    data = memoryview(frames.encode(message))
    while data:
        data = data[os.write(fd, data) :]


def _disarm() -> None:
    """Ends an alarm that the function set, so that it cannot go off in the next sample."""
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except BaseException:  # the alarm's own handler, going off in this very line
            continue


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had died before the call
        os._exit(1)


if __name__ == "__main__":
    main()
