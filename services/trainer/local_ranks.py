"""Ranks as plain child processes, without Ray: for a program that trains beside no run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nightshift.wire.errors import NightshiftError, RoleTimeoutError
from services.trainer.config import RankConfig
from services.trainer.coordinator import RankFailedError
from services.trainer.rank_actor import RankActor, environment

_JOIN_S = 10.0


class LocalRanks:
    """Processes that hold a rank each; what the coordinator calls.

    Args:
        config: of the ranks.
        world: how many.
        timeout_s: deadline of one call.
    """

    def __init__(self, config: RankConfig, world: int, timeout_s: float) -> None:
        self.world = world
        self._timeout_s = timeout_s
        self._failure: RankFailedError | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="nightshift-ranks-"))
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            # The C library and OpenMP read these when a process starts.
            with _environment(environment(config, rank, world)):
                process = context.Process(target=_serve, args=(theirs, config, rank, world), daemon=True)
                process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    async def start(self) -> dict[str, Any]:
        """Lets the ranks meet and load the model; returns what rank 0 says of itself.

        Raises:
            NightshiftError: a rank cannot start.
        """
        meeting = f"file://{self._folder}/rendezvous" if self.world > 1 else None
        facts = await self.call("setup", meeting, True)
        return dict(facts[0])

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank; results in rank order.

        Raises:
            RankFailedError: a rank's process has ended, or they were given up.
            RoleTimeoutError: no answer in time.
            NightshiftError: what a rank raised.
        """
        if self._failure is not None:
            raise self._failure
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((method, args))
            except OSError as error:
                raise RankFailedError(f"rank {rank} died before {method}", role="trainer") from error
        answers = await asyncio.gather(
            *(asyncio.to_thread(self._receive, rank, method) for rank in range(self.world)), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return list(answers)

    def give_up(self, error: RankFailedError) -> None:
        """See :class:`services.trainer.coordinator.Ranks`."""
        self._failure = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _receive(self, rank: int, method: str) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(self._timeout_s):
            raise RoleTimeoutError(f"waited {self._timeout_s:g} s for rank {rank} to {method}", role="trainer")
        try:
            done, result = pipe.recv()
        except EOFError as error:
            raise RankFailedError(f"rank {rank} died during {method}", role="trainer") from error
        if not done:
            raise NightshiftError(result["message"], role=result["role"], fix=result["fix"])
        return result


def _serve(pipe: Connection, config: RankConfig, rank: int, world: int) -> None:
    """A rank's process: answers calls until the other end of the pipe is closed."""
    actor = RankActor(config, rank, world)
    while True:
        try:
            method, args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer: tuple[bool, Any] = (True, getattr(actor, method)(*args))
        except NightshiftError as error:
            answer = (False, error.to_dict())
        except Exception as error:
            answer = (False, {"message": f"{type(error).__name__}: {error}", "role": "trainer", "fix": ""})
        pipe.send(answer)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
