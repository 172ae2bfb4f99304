"""The ledger with its storage: every change is in SQL before anything is done with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import OperationalError

from nightshift.wire.errors import RoleTimeoutError
from nightshift.wire.events import EventLog
from nightshift.wire.version import Lineage
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger
from orchestrator.store.state import RunState, StateStore

T = TypeVar("T")
#: Time between two transactions, in times of what the first one took, and at most.
_REST, _LONGEST_REST_S = 3.0, 0.05


async def patiently(work: Callable[[], Awaitable[T]], events: EventLog, away_s: float) -> T:
    """Does something with the database, again and again while it is away.

    Args:
        away_s: how long it may be away.

    Raises:
        RoleTimeoutError: it was away for longer.
    """
    deadline, pause = time.monotonic() + away_s, 0.2
    while True:
        try:
            return await work()
        except OperationalError as error:
            cause = str(error.orig)
            if time.monotonic() + pause > deadline:
                raise RoleTimeoutError(
                    f"the database was away for {away_s:g} s: {cause}", role="orchestrator"
                ) from error
            events.append("warning", role="orchestrator", message=f"database away, waiting: {cause}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 5.0)


class Books:
    """Ledger of one run. While the database is away, calls wait: no new group starts and nothing commits.

    Args:
        away_s: how long the database may be away.
    """

    def __init__(self, store: StateStore, run_id: str, ledger: Ledger, events: EventLog, away_s: float) -> None:
        self.ledger = ledger
        self._store = store
        self._run_id = run_id
        self._events = events
        self._away_s = away_s
        # One thread: SQLite connections stay in it, and writes keep their order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")
        self._unsaved: dict[int, GroupRecord] = {}
        self._saving = asyncio.Lock()
        self._open = asyncio.Event()  # groups may be noted
        self._open.set()
        self._rested = 0.0  # when the next transaction may begin, seconds of the monotonic clock

    async def opened(self) -> None:
        """Waits until groups may be noted: nothing closes the books then before the caller's next await."""
        await self._open.wait()

    async def issue(self, *records: GroupRecord) -> None:
        """Enters new groups, in one transaction."""
        await self._open.wait()
        await self._write([self.ledger.issue(record) for record in records])

    async def move(self, index: int, state: GroupState, **changes: object) -> None:
        """Moves a group to another state."""
        await self._open.wait()
        await self._write([self.ledger.move(index, state, **changes)])

    async def train(self, indices: Iterable[int], step: int, lineage: int) -> None:
        """Marks the groups of a step as trained, all or none."""
        await self._write(self.ledger.train(indices, step, lineage))
        self.ledger.check()

    async def roll_back(self, step: int, ready: frozenset[int]) -> None:
        """Goes back to the commit of ``step``."""
        await self._write(self.ledger.roll_back(step, ready))
        self.ledger.recount()

    async def flush(self) -> None:
        """Writes everything that was noted, also by callers that were cancelled: a commit must never know more than
        the database. Nothing is noted meanwhile, nor before the caller's next await.

        Raises:
            FencedError: another process drives the run now; this one may not commit.
            LedgerError: the ledger's counters and its records disagree.
        """
        self.ledger.recount()
        self._open.clear()
        try:
            await self._do(lambda: self._store.check_fence(self._run_id))
            async with self._saving:
                while self._unsaved:
                    await self._save()
        finally:
            self._open.set()

    async def _save(self) -> None:
        """Writes what is unsaved, in one transaction."""
        records, began = list(self._unsaved.values()), time.monotonic()
        await self._do(partial(self._store.save_groups, self._run_id, records))
        for record in records:
            if self._unsaved.get(record.index) is record:
                del self._unsaved[record.index]
        self._rested = time.monotonic() + min(_LONGEST_REST_S, _REST * (time.monotonic() - began))

    async def save_run(self, lineage: Lineage, job_trace_id: str, state: str) -> None:
        """Writes the run's own row."""
        await self._do(lambda: self._store.save_run(RunState(lineage, job_trace_id, state)))

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._thread.shutdown()
        self._store.close()

    async def _write(self, records: list[GroupRecord]) -> None:
        """Returns when these records are saved, or newer ones of the same groups."""
        self._unsaved.update((record.index, record) for record in records)
        while any(record.index in self._unsaved for record in records):
            async with self._saving:
                if not any(record.index in self._unsaved for record in records):
                    return  # they went with those of the caller before
                # A transaction costs much the same for one group as for a hundred: under load they travel together.
                if (rest := self._rested - time.monotonic()) > 0:
                    await asyncio.sleep(rest)
                await self._save()

    async def _do(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        # Shielded: what was handed to the thread is written even where the caller is cancelled.
        return await patiently(
            lambda: asyncio.shield(loop.run_in_executor(self._thread, work)), self._events, self._away_s
        )
