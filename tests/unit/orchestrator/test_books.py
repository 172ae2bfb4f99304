"""The ledger with its storage: what was noted is written, in order, whatever is cancelled or away."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from nightshift.wire.errors import RoleTimeoutError
from nightshift.wire.events import EventLog, read_events
from orchestrator.runner.books import Books
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger, LedgerError
from orchestrator.store.state import FencedError


class MemoryStore:
    """Keeps what is saved; may be slow or away."""

    def __init__(self) -> None:
        self.records: dict[int, GroupRecord] = {}
        self.open = threading.Event()
        self.open.set()
        self.failures = 0
        self.fenced = False

    def save_groups(self, _run_id: str, records: list[GroupRecord]) -> None:
        self.open.wait(10)
        if self.failures:
            self.failures -= 1
            raise OperationalError("insert", {}, Exception("gone"))
        self.records.update((record.index, record) for record in records)

    def check_fence(self, _run_id: str) -> None:
        if self.fenced:
            raise FencedError("replaced", role="orchestrator")

    def close(self) -> None:
        pass


class CountingStore(MemoryStore):
    """Counts transactions, each of which takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.writes = 0

    def save_groups(self, run_id: str, records: list[GroupRecord]) -> None:
        self.writes += 1
        time.sleep(self.seconds)
        super().save_groups(run_id, records)


def make_books(tmp_path: Path, store: MemoryStore, away_s: float = 5.0) -> Books:
    events = EventLog(tmp_path / "events.jsonl", "run")
    return Books(store, "run", Ledger(), events, away_s)  # type: ignore[arg-type]


def record(index: int) -> GroupRecord:
    return GroupRecord(index, index, 0, f"{index:032x}")


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_committed_where_the_counters_are_wrong(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    await books.issue(record(0), record(1))
    books.ledger.counts[GroupState.RUNNING] -= 1
    books.ledger.counts[GroupState.FAILED] += 1
    with pytest.raises(LedgerError, match="disagree with its records"):
        await books.flush()
    books.close()


async def test_what_a_cancelled_caller_noted_is_written_before_a_commit(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    store.open.clear()
    issuing = [asyncio.create_task(books.issue(record(index))) for index in range(3)]
    await asyncio.sleep(0.02)
    for task in issuing:
        await cancel(task)
    store.open.set()
    await books.flush()
    assert sorted(store.records) == [0, 1, 2] == sorted(books.ledger.records)
    books.close()


async def test_an_older_state_never_overwrites_a_newer_one(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    store.failures = 1
    issuing = asyncio.create_task(books.issue(record(0)))
    await asyncio.sleep(0.02)
    moving = asyncio.create_task(books.move(0, GroupState.READY))
    await asyncio.gather(issuing, moving)
    assert store.records[0].state is GroupState.READY
    books.close()


async def test_the_database_may_be_away_for_a_while_and_not_for_longer(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store, away_s=0.5)
    store.failures = 1
    await books.issue(record(0))
    assert [event["message"] for event in read_events(tmp_path / "events.jsonl")] == ["database away, waiting: gone"]
    store.failures = 1000
    with pytest.raises(RoleTimeoutError, match=r"the database was away for 0\.5 s: gone"):
        await books.issue(record(1))
    books.close()


async def test_many_groups_at_once_are_all_written(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)

    async def life(index: int) -> None:
        await books.move(index, GroupState.READY)

    for index in range(50):
        await books.issue(record(index))
    await asyncio.gather(*(life(index) for index in range(50)))
    await books.train(range(50), 1, 0)
    assert {kept.state for kept in store.records.values()} == {GroupState.TRAINED}
    assert store.records == books.ledger.records
    books.close()


async def test_nothing_is_noted_while_a_commit_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    store.open.clear()

    async def commit() -> tuple[list[int], list[int]]:
        await books.flush()
        return sorted(store.records), list(range(books.ledger.issued))

    first = asyncio.create_task(books.issue(record(0)))
    flushing = asyncio.create_task(commit())
    await asyncio.sleep(0.02)
    later = asyncio.create_task(books.issue(record(1)))
    await asyncio.sleep(0.02)
    store.open.set()
    assert await flushing == ([0], [0])
    await asyncio.gather(first, later)
    assert sorted(store.records) == list(range(books.ledger.issued)) == [0, 1]
    books.close()


async def test_a_caller_waits_for_its_own_groups_alone_and_under_load_they_travel_together(tmp_path: Path) -> None:
    store = CountingStore(seconds=0.002)
    books = make_books(tmp_path, store)
    await books.issue(*(record(index) for index in range(400)))
    assert store.writes == 1
    begun = asyncio.get_running_loop().time()
    ended: list[float] = []

    async def life(index: int) -> None:
        await asyncio.sleep(0.001 * index)  # another group is noted during every write
        await books.move(index, GroupState.READY)
        ended.append(asyncio.get_running_loop().time() - begun)

    await asyncio.gather(*(life(index) for index in range(400)))
    assert ended[0] < 0.5 * ended[-1], "the first caller waited for those that came after it"
    assert store.writes < 200
    assert {kept.state for kept in store.records.values()} == {GroupState.READY}
    books.close()


async def test_a_process_that_was_replaced_cannot_commit(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    await books.flush()
    store.fenced = True
    with pytest.raises(FencedError):
        await books.flush()
    books.close()
