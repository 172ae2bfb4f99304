"""Open files of the process: how many connections to servers there may be, and who waits or gives way at the limit."""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from typing import Protocol

#: Files left for everything else, calls to servers that are not for samples among it.
_RESERVED = 1024


def raise_limit() -> int:
    """Raises the soft limit of open files to the hard one, which needs no rights; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class Idle(Protocol):
    """A connection that nobody uses now."""

    def close(self) -> None:
        """Closes it; it leaves the room then."""


class Room:
    """Connections that may be open at once, over all servers. One stream has one connection, so that this bounds the
    responses in flight as well: further requests wait here, and not in vain for a file.

    Args:
        limit: their number; None: what the process may open, less a reserve.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self.open = 0
        self._idle: dict[Idle, None] = {}  # the longest idle first
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Most connections at once."""
        if self._limit is None:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._limit = max(1, soft - _RESERVED) if soft > 0 else 1 << 30
        return self._limit

    def enter(self) -> bool:
        """Takes a place where there is one, or where an idle connection can be closed for it."""
        while self.open >= self.limit and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.close()
        if self.open >= self.limit:
            return False
        self.open += 1
        return True

    async def wait(self) -> None:
        """Waits until a place may have come free, or a connection idle."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._wake()  # what was offered is for the next one
            raise

    def leave(self) -> None:
        """Gives the place of a closed connection back."""
        self.open -= 1
        self._wake()

    def rest(self, connection: Idle) -> None:
        """Notes that a connection is idle: it makes way for one that is needed."""
        self._idle[connection] = None
        self._wake()

    def use(self, connection: Idle) -> bool:
        """Whether an idle connection may be used again: it was not closed to make way."""
        return self._idle.pop(connection, False) is None

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


#: Of this process.
ROOM = Room()
