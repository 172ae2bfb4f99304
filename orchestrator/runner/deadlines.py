"""Deadlines of many waits that may all take equally long: one timer for all of them, and nothing to sort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Deadlines:
    """Ends waits that take longer than so many seconds, or all of them at once, with ``TimeoutError``.

    They begin in the order in which they are due, so that only the first one needs a timer. A timer of its own for each
    of thousands of responses was a twentieth of what it costs to draw them.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waits: dict[asyncio.Future[Any], float] = {}  # when each is due, the first one first
        self._blocks: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, wait: asyncio.Future[Any]) -> None:
        """Ends this future in time unless :meth:`forget` comes before."""
        loop = wait.get_loop()
        self._waits[wait] = due = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._look, loop)

    def forget(self, wait: asyncio.Future[Any]) -> None:
        """The wait is over."""
        self._waits.pop(wait, None)

    @asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        """A deadline for whatever is awaited within."""
        async with asyncio.timeout(self._seconds) as timeout:
            self._blocks.add(timeout)
            try:
                yield
            finally:
                self._blocks.discard(timeout)

    def expire(self) -> None:
        """Ends everything that waits now."""
        waits, self._waits = self._waits, {}
        for wait in waits:
            _end(wait)
        for timeout in self._blocks:
            timeout.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Gives up the timer; nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        while self._waits:
            wait, due = next(iter(self._waits.items()))
            if due > now:
                self._timer = loop.call_at(due, self._look, loop)
                return
            del self._waits[wait]
            _end(wait)


def _end(wait: asyncio.Future[Any]) -> None:
    if not wait.done():
        wait.set_exception(TimeoutError())
