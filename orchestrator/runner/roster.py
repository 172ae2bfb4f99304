"""The rollout servers of a run: who joins, who comes back as another start, who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Protocol

from nightshift.wire.events import EventLog
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.server import Server


class Lending(Protocol):
    """Who lends servers to a run: :class:`orchestrator.runner.lent.Lent`."""

    @property
    def empty(self) -> bool:
        """Whether nothing is lent now, and that is nobody's fault."""

    @property
    def overdue(self) -> str:
        """Why it is in vain to wait for a server any longer; "": it is not."""

    def begin(self) -> None:
        """Servers are wanted."""

    def end(self) -> None:
        """No server is used any more."""

    def patience(self, address: EngineAddress) -> float:
        """Seconds for which requests may end on a server that has left."""

    def left(self, address: EngineAddress) -> None:
        """A server that has left is not used any more."""


class Roster:
    """Servers by name.

    Args:
        make: makes a server of an address.
        left: is told of each server that gets no work any more, under its name.
        lending: who lends the servers; None: they are the run's own.
    """

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        make: Callable[[EngineAddress], Server],
        events: EventLog,
        left: Callable[[str], None],
        lending: Lending | None = None,
    ) -> None:
        self._make = make
        self._usable: list[Server] | None = None  # None: to be looked through again
        self._events = events
        self._left = left
        self._lending = lending
        self._servers = {address.name: self._take_in(address) for address in addresses}
        self._leaving: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Server]:
        return iter(list(self._servers.values()))

    @property
    def usable(self) -> list[Server]:
        """Those that may be given work."""
        # Asked for each request, where hundreds of servers would have to be looked through.
        if self._usable is None:
            self._usable = [server for server in self._servers.values() if server.health.usable]
        return self._usable

    def has(self, server: Server) -> bool:
        """Whether this start of the server is the one that is listed now."""
        return self._servers.get(server.name) is server

    def update(self, addresses: Iterable[EngineAddress]) -> bool:
        """Takes what is listed now: further servers, other starts of known ones; those that are missing have left.

        A server that left gets no new work. Its requests end there, or go on elsewhere where it ends first; on one that
        was lent, they may end for a while and are then broken off.

        Returns:
            Whether there are other servers than before.
        """
        before = set(self._servers.values())
        listed = {address.name: address for address in addresses}
        for name in self._servers.keys() - listed.keys():
            server = self._servers.pop(name)
            server.health.retire()
            self._events.append("role", role="rollout", state="retired", detail=f"{name} left the run")
            self._close_later(server)
        for name, address in listed.items():
            known = self._servers.get(name)
            if known is not None and known.address.incarnation == address.incarnation:
                continue
            self._servers[name] = self._take_in(address)
            if known is not None:
                known.health.retire()
                known.engine.break_off("it was started again")
                self._close_later(known)
        return before != set(self._servers.values())

    def _take_in(self, address: EngineAddress) -> Server:
        server = self._make(address)
        server.health.changed = self._look_again
        return server

    def _look_again(self) -> None:
        self._usable = None

    async def close(self) -> None:
        """Closes all connections."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for server in self._servers.values():
            await server.engine.close()

    def _close_later(self, server: Server) -> None:
        self._left(server.name)
        task = asyncio.create_task(self._close_when_idle(server))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _close_when_idle(self, server: Server) -> None:
        try:
            if self._lending is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(server.idle.wait(), self._lending.patience(server.address))
                if server.running:
                    server.engine.break_off("it was asked back")
            await server.idle.wait()
            await server.pushing.acquire()  # a push that is under way comes to its end
        finally:
            await server.engine.close()
            if self._lending is not None:
                self._lending.left(server.address)
