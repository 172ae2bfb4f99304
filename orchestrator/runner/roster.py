"""The rollout servers of a run: who joins, who comes back as another start, who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from nightshift.wire.events import EventLog
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.server import Server


class Roster:
    """Servers by name.

    Args:
        make: makes a server of an address.
        left: is told of each server that is not used any more, under its name.
    """

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        make: Callable[[EngineAddress], Server],
        events: EventLog,
        left: Callable[[str], None],
    ) -> None:
        self._make = make
        self._events = events
        self._left = left
        self._servers = {address.name: make(address) for address in addresses}
        self._leaving: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Server]:
        return iter(list(self._servers.values()))

    @property
    def usable(self) -> list[Server]:
        """Those that may be given work."""
        return [server for server in self._servers.values() if server.health.usable]

    def has(self, server: Server) -> bool:
        """Whether this start of the server is the one that is listed now."""
        return self._servers.get(server.name) is server

    def update(self, addresses: Iterable[EngineAddress]) -> None:
        """Takes what is listed now: further servers, other starts of known ones; those that are missing have left.

        A server that left gets no new work. Its requests end there, or go on elsewhere where it ends first.
        """
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
            self._servers[name] = self._make(address)
            if known is not None:
                known.health.retire()
                known.engine.break_off("it was started again")
                self._close_later(known)

    async def close(self) -> None:
        """Closes all connections."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for server in self._servers.values():
            await server.engine.close()

    def _close_later(self, server: Server) -> None:
        self._left(server.name)
        task = asyncio.create_task(_close_when_idle(server))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


async def _close_when_idle(server: Server) -> None:
    try:
        await server.idle.wait()
        await server.pushing.acquire()  # a push that is under way comes to its end
    finally:
        await server.engine.close()
