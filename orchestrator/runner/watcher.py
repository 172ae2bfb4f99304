"""Looks after the rollout servers while a run works: addresses, health, load, and weights for those that lack them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from nightshift.wire.errors import NightshiftError, RoleError, RoleTimeoutError
from nightshift.wire.events import EventLog
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.health import ServerState
from orchestrator.runner.published import Published
from orchestrator.runner.refill import Refill
from orchestrator.runner.roster import Roster
from orchestrator.runner.server import Proof, Server

#: Seconds between two looks at the servers, and between two questions for their load: more where there are many, since
#: each answer is a whole page of metrics.
_LOOK_S = 0.5
_LOAD_S, _LOAD_EACH_S = 2.0, 0.03


class Watcher:
    """Runs beside the pipeline. Each server is asked and pushed by a task of its own: one that hangs delays no other.

    Args:
        refresh: reads the current addresses; None: they cannot be told now.
        ask_restart: asks whoever started a server to start it again, with the reason.
        changed: is called when a server has become usable, or has room.
        held: whether all servers are held on purpose.
        resting: whether all servers sleep on purpose: then one that comes, or comes back, is put to sleep as well.
        patience_s: longest time for the requests of one that is put to sleep.
    """

    def __init__(
        self,
        roster: Roster,
        published: Published,
        proof: Proof,
        refill: Refill,
        events: EventLog,
        *,
        refresh: Callable[[], list[EngineAddress] | None],
        ask_restart: Callable[[EngineAddress, str], None],
        changed: Callable[[], Awaitable[None]],
        held: Callable[[], bool],
        resting: Callable[[], bool] = lambda: False,
        patience_s: float = 300.0,
    ) -> None:
        self._roster = roster
        self._published = published
        self._proof = proof
        self._refill = refill
        self._events = events
        self._refresh = refresh
        self._ask_restart = ask_restart
        self._changed = changed
        self._held = held
        self._resting = resting
        self._patience_s = patience_s
        self._watching: asyncio.Task[None] | None = None
        self._tasks: dict[tuple[str, Server], asyncio.Task[None]] = {}
        self._asked_load = 0.0
        self._told = ""

    def start(self) -> None:
        """Begins to look."""
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends it."""
        tasks = [task for task in (self._watching, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def suspect(self, server: Server, error: NightshiftError) -> None:
        """A request to a server failed: it gets no work before it was looked at."""
        server.error = error.message
        if server.health.suspect():
            self._tell(server, "suspect", error.message)

    def hangs(self, server: Server, cause: str) -> None:
        """A server does not get on: its requests go on elsewhere, and another start of it is asked for."""
        if not server.health.restarting(time.monotonic()):
            return
        server.error = cause
        server.engine.break_off(cause)
        what = "another start of it is asked for" if server.address.managed else "it gets no work until it gets on"
        self._tell(server, "suspect", f"{cause}; {what}")
        if server.address.managed:
            self._ask_restart(server.address, cause)

    def back(self, server: Server, version: str, seconds: float) -> None:
        """Tells that a server is used again, or for the first time."""
        self._tell(server, "ready", f"{server.name} holds {version} again", seconds)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except Exception as error:  # without it, a run would hold servers that it was asked to give back
                self._warn("rollout", f"the servers could not be looked at: {type(error).__name__}: {error}")

    async def _look(self) -> None:
        if self._read_addresses():
            await self._changed()
        now = time.monotonic()
        servers = list(self._roster)
        ask_load = now - self._asked_load >= max(_LOAD_S, _LOAD_EACH_S * len(servers))
        if ask_load:
            self._asked_load = now
        for server in servers:
            if server.health.due(now) and self._published.current is not None:
                self._begin("repair", server, self._repair)
            if ask_load and server.health.usable:
                self._begin("load", server, self._ask_load)

    def _begin(self, what: str, server: Server, work: Callable[[Server], Awaitable[None]]) -> None:
        """Starts work on a server, unless the same is under way."""
        key = (what, server)
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.ensure_future(work(server))
            task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, Server], task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell(key[1], "suspect", f"{type(error).__name__}: {error}")

    def _read_addresses(self) -> bool:
        try:
            listed = self._refresh()
        except (KeyError, OSError, TypeError, ValueError) as error:
            self._warn("agent", f"addresses of the services: {error!r}")
            return False
        return listed is not None and self._roster.update(listed)

    async def _repair(self, server: Server) -> None:
        """Brings a server that is not healthy to the published weights, or to sleep, if it answers."""
        if not await server.engine.healthy():
            if server.health.unanswered(time.monotonic()):
                self._tell(server, "dead", "no answer to its health check")
            return
        server.health.answered()
        began = time.monotonic()
        async with server.pushing:
            publication = self._published.current
            if server.health.usable or publication is None:
                return
            rests = self._resting()
            try:
                if rests:
                    await server.lull(self._patience_s)
                else:
                    await server.bring(publication, self._proof)
            except NightshiftError as error:
                server.error = error.message
                server.health.failed(time.monotonic())
                if isinstance(error, RoleTimeoutError):
                    self.hangs(server, error.message)
                else:
                    self._events.append("warning", role=error.role or "rollout", message=error.message)
                return
            if rests and self._resting():
                return
            if rests or self._published.current is not publication:  # it was published beside this: once more
                server.health.failed(time.monotonic())
                return
            if not server.proved(publication):
                return
        self.back(server, publication.version, time.monotonic() - began)
        await self._changed()

    async def _ask_load(self, server: Server) -> None:
        """Takes a reading of a server's load, and notices where it does not get on with its requests."""
        load, answered = None, True
        try:
            load = await server.engine.load()
        except RoleError:
            answered = False
        now = time.monotonic()
        # A server without metrics cannot be judged: its requests have their own deadline.
        if server.pushing.locked() or self._held() or (answered and load is None):
            server.stall.reset(now)
        silent = server.stall.observe(now, requests=server.running, tokens=load.tokens if load else None)
        if silent and server.health.state is ServerState.HEALTHY:
            what = "drew no token" if answered else "did not answer /metrics"
            self.hangs(server, f"{what} for {silent:.0f} s with {server.running} requests")
        elif load is not None and self._roster.has(server) and not server.pushing.locked():
            self._refill.observe(server.name, load, server.running)
            await self._changed()

    def _warn(self, role: str, text: str) -> None:
        """Says what is wrong, once as long as it is the same."""
        if text != self._told:
            self._told = text
            self._events.append("warning", role=role, message=text)

    def _tell(self, server: Server, state: str, text: str, seconds: float | None = None) -> None:
        detail = text if server.name in text else f"{server.name}: {text}"
        self._events.append("role", role="rollout", state=state, detail=detail, seconds=seconds)
