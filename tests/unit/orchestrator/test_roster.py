"""Servers that join, come back and leave: none is used before weights were pushed to it and proved."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nightshift.wire.events import EventLog
from orchestrator.runner.engine import EngineAddress
from orchestrator.runner.health import Health, ServerState
from orchestrator.runner.roster import Roster

NAMES = ("a", "b", "c")


class FakeServer:
    """A start of a server as far as the roster sees it."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self.health = Health()
        self.idle = asyncio.Event()
        self.idle.set()
        self.pushing = asyncio.Lock()
        self.broken = False
        self.closed = False
        self.engine: Any = self

    def break_off(self, cause: str) -> None:
        self.broken = True

    async def close(self) -> None:
        self.closed = True


def address(name: str, incarnation: int) -> EngineAddress:
    return EngineAddress(name, f"http://{name}", "t", str(incarnation))


class RosterMachine(RuleBasedStateMachine):
    """Any list of servers at any time, any starts, any outcome of pushes; requests that keep a server busy."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.events = EventLog(Path(self.folder.name) / "events.jsonl", "run")
        self.forgotten: list[str] = []
        self.roster: Any = Roster([], FakeServer, self.events, self.forgotten.append)  # type: ignore[arg-type]
        self.incarnations = dict.fromkeys(NAMES, 0)
        self.proved: set[int] = set()  # starts whose last push was proved, and to which nothing has happened since
        self.seen: list[FakeServer] = []

    def servers(self) -> list[FakeServer]:
        return list(self.roster)

    @rule(listed=st.sets(st.sampled_from(NAMES)), restarted=st.sets(st.sampled_from(NAMES)))
    def look(self, listed: set[str], restarted: set[str]) -> None:
        for name in restarted:
            self.incarnations[name] += 1
        before = {server.name: server for server in self.servers()}

        async def update() -> None:
            self.roster.update([address(name, self.incarnations[name]) for name in listed])
            await asyncio.sleep(0)

        self.loop.run_until_complete(update())
        now = {server.name: server for server in self.servers()}
        assert set(now) == listed
        for name, server in before.items():
            if now.get(name) is not server:
                assert server.health.state is ServerState.RETIRED
                assert server.broken == (name in listed)  # one that only left ends what it has
                assert name in self.forgotten
        self.seen += [server for server in now.values() if server not in self.seen]

    @rule(at=st.integers(0, 2), works=st.booleans())
    def push(self, at: int, works: bool) -> None:
        for server in self.servers()[at : at + 1]:
            server.health.pushing()
            self.proved.discard(id(server))
            if works:
                assert server.health.proved("run/0/1")
                self.proved.add(id(server))
            else:
                server.health.failed(0.0)

    @rule(at=st.integers(0, 2))
    def suspect(self, at: int) -> None:
        for server in self.servers()[at : at + 1]:
            server.health.suspect()
            self.proved.discard(id(server))

    @rule(at=st.integers(0, 20), busy=st.booleans())
    def work(self, at: int, busy: bool) -> None:
        for server in self.seen[at : at + 1]:
            if not server.closed:
                server.idle.clear() if busy else server.idle.set()
        self.loop.run_until_complete(asyncio.sleep(0))

    @invariant()
    def used_are_those_that_were_proved_in_this_start(self) -> None:
        assert {id(server) for server in self.roster.usable} == {
            id(server) for server in self.servers() if id(server) in self.proved
        }
        assert all(self.roster.has(server) for server in self.servers())

    @invariant()
    def one_that_left_is_closed_once_it_is_idle_and_not_before(self) -> None:
        listed = self.servers()
        for server in self.seen:
            if server in listed or not server.idle.is_set():
                assert not server.closed or server not in listed

    def teardown(self) -> None:
        self.loop.run_until_complete(self.roster.close())
        assert all(server.closed for server in self.seen)
        self.loop.close()
        self.events.close()
        self.folder.cleanup()


TestRosterMachine = RosterMachine.TestCase
TestRosterMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
