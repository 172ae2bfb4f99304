"""Runners as processes that start in milliseconds: forked from one that has imported everything and done nothing yet.

``python -m tests.chaos.runners`` reads ``{"run_dir": ..., "resume": ...}`` lines and answers ``{"pid": ...}`` when a
runner was started and ``{"pid": ..., "code": ...}`` when it has ended (-9: it was killed).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


class Runner:
    """One runner."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def kill(self) -> bool:
        """kill -9; whether it was still there."""
        if self.ended.done():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            return True
        return False


class Runners:
    """The process that runners are forked from."""

    def __init__(self) -> None:
        self._runners: dict[int, Runner] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started: asyncio.Queue[Runner] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.chaos.runners",
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        for runner in self._runners.values():
            runner.kill()
        self._process.stdin.close()  # type: ignore[union-attr]
        await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def start(self, run_dir: Path, *, resume: bool) -> Runner:
        """Starts a runner."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run_dir": str(run_dir), "resume": resume}).encode() + b"\n")
        await self._process.stdin.drain()
        return await asyncio.wait_for(self._started.get(), 60)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "code" in said:
                self._runners.pop(said["pid"]).ended.set_result(said["code"])
            else:
                runner = self._runners[said["pid"]] = Runner(said["pid"])
                self._started.put_nowait(runner)


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # The runner's module has no state before main(): this process is what a fresh one would be.
        log = os.open(Path(order["run_dir"]) / "runner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        from orchestrator.runner.__main__ import main

        sys.argv = ["runner", "--run-dir", order["run_dir"], *(["--resume"] if order["resume"] else [])]
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Forks runners as asked, and says when they have ended."""
    import orchestrator.runner.__main__  # noqa: F401  # imported once, for all of them

    living: set[int] = set()
    buffer, open_ = b"", True
    while open_ or living:
        ready = select.select([0] if open_ else [], [], [], 0.01)[0]
        if ready:
            data = os.read(0, 1 << 16)
            open_, buffer = bool(data), buffer + data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line))
                living.add(pid)
                _say({"pid": pid})
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.discard(pid)
                _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(value: dict[str, int]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    serve()
