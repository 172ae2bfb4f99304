"""Ledgers that the service keeps open: one a database, few at a time, none of a database that is gone."""

from __future__ import annotations

import threading
from pathlib import Path

from orchestrator.api.ledgers import Ledgers
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.store.state import StateStore


def url(folder: Path, name: str) -> str:
    return f"sqlite:///{folder / name}.db"


def test_one_store_for_each_database_also_for_threads_at_once(tmp_path: Path) -> None:
    ledgers, found = Ledgers(), []
    threads = [threading.Thread(target=lambda: found.append(ledgers.store(url(tmp_path, "a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(store) for store in found}) == 1
    assert ledgers.store(url(tmp_path, "b")) is not found[0]
    ledgers.close()


def test_the_one_asked_least_recently_gives_way_and_still_answers(tmp_path: Path) -> None:
    ledgers = Ledgers(most=2)
    first, second = ledgers.store(url(tmp_path, "a")), ledgers.store(url(tmp_path, "b"))
    assert ledgers.store(url(tmp_path, "a")) is first
    ledgers.store(url(tmp_path, "c"))
    assert ledgers.store(url(tmp_path, "a")) is first
    assert ledgers.store(url(tmp_path, "b")) is not second, "it was closed"
    assert second.balance("run")["issued"] == 0, "whoever held it gets an answer"
    ledgers.close()


def test_what_others_write_is_seen_and_what_is_removed_is_forgotten(tmp_path: Path) -> None:
    ledgers, path = Ledgers(), tmp_path / "a.db"
    kept = ledgers.store(url(tmp_path, "a"))
    runner = StateStore(url(tmp_path, "a"))
    runner.save_groups("run", [GroupRecord(index=0, row=0, epoch=0, trace_id="t", state=GroupState.TRAINED, step=1)])
    assert kept.balance("run")["trained"] == 1
    runner.close()
    ledgers.forget(url(tmp_path, "a"))
    for left in tmp_path.glob("a.db*"):
        left.unlink()
    assert not path.exists()
    assert ledgers.store(url(tmp_path, "a")).balance("run")["trained"] == 0
    ledgers.close()
