"""The ledger with its storage: what was noted is written, in order, whatever is cancelled or away."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from nightshift.wire.errors import RoleTimeoutError
from nightshift.wire.events import EventLog, read_events
from orchestrator.runner.books import Books
from orchestrator.runner.ledger import GroupRecord, GroupState, Ledger
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


def make_books(tmp_path: Path, store: MemoryStore, away_s: float = 5.0) -> Books:
    events = EventLog(tmp_path / "events.jsonl", "run")
    return Books(store, "run", Ledger(), events, away_s)  # type: ignore[arg-type]


def record(index: int) -> GroupRecord:
    return GroupRecord(index, index, 0, f"{index:032x}")


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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


async def test_what_is_noted_while_a_commit_is_written_is_written_with_it(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    store.open.clear()
    first = asyncio.create_task(books.issue(record(0)))
    flushing = asyncio.create_task(books.flush())
    await asyncio.sleep(0.02)
    later = asyncio.create_task(books.issue(record(1)))
    await asyncio.sleep(0.02)
    store.open.set()
    await flushing
    assert sorted(store.records) == list(range(books.ledger.issued)) == [0, 1]
    await asyncio.gather(first, later)
    books.close()


async def test_a_process_that_was_replaced_cannot_commit(tmp_path: Path) -> None:
    store = MemoryStore()
    books = make_books(tmp_path, store)
    await books.flush()
    store.fenced = True
    with pytest.raises(FencedError):
        await books.flush()
    books.close()
