"""The ledger with its storage: every change is in SQL before anything is done with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
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

    async def issue(self, record: GroupRecord) -> None:
        """Enters a new group."""
        self.ledger.issue(record)
        await self._write([record])

    async def move(self, index: int, state: GroupState, **changes: object) -> None:
        """Moves a group to another state."""
        await self._write([self.ledger.move(index, state, **changes)])

    async def train(self, indices: Iterable[int], step: int, lineage: int) -> None:
        """Marks the groups of a step as trained, all or none."""
        await self._write(self.ledger.train(indices, step, lineage))
        self.ledger.check()

    async def roll_back(self, step: int, ready: frozenset[int]) -> None:
        """Goes back to the commit of ``step``."""
        await self._write(self.ledger.roll_back(step, ready))
        self.ledger.check()

    async def flush(self) -> None:
        """Writes what a caller that was cancelled left unwritten: a commit must never know more than the database.

        Raises:
            FencedError: another process drives the run now; this one may not commit.
        """
        await self._do(lambda: self._store.check_fence(self._run_id))
        await self._save()  # last: nothing may be noted between it and the commit

    async def _save(self) -> None:
        async with self._saving:
            # Until nothing is left: what was noted while this wrote is known to the commit that comes next, too.
            while records := list(self._unsaved.values()):
                await self._do(partial(self._store.save_groups, self._run_id, records))
                for record in records:
                    if self._unsaved.get(record.index) is record:
                        del self._unsaved[record.index]

    async def save_run(self, lineage: Lineage, job_trace_id: str, state: str) -> None:
        """Writes the run's own row."""
        await self._do(lambda: self._store.save_run(RunState(lineage, job_trace_id, state)))

    def close(self) -> None:
        """Ends the thread after what is queued."""
        self._thread.shutdown()
        self._store.close()

    async def _write(self, records: list[GroupRecord]) -> None:
        self._unsaved.update((record.index, record) for record in records)
        await self._save()

    async def _do(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._away_s, 0.2
        while True:
            try:
                # Shielded: what was handed to the thread is written even where the caller is cancelled.
                return await asyncio.shield(loop.run_in_executor(self._thread, work))
            except OperationalError as error:
                cause = str(error.orig)
                if loop.time() + pause > deadline:
                    raise RoleTimeoutError(
                        f"the database was away for {self._away_s:g} s: {cause}", role="orchestrator"
                    ) from error
                self._events.append("warning", role="orchestrator", message=f"database away, waiting: {cause}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)
