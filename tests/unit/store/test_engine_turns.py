"""Writers of one process wait for each other, however many there are and however slow the disk is."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from orchestrator.store import engine as engines
from orchestrator.store.engine import connect


def test_many_writers_at_once_all_get_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself waits for next to nothing here, so that nothing but the turns can help."""
    engine = connect(f"sqlite:///{tmp_path / 'state.db'}")
    engine.dispose()
    monkeypatch.setattr(engines, "_BUSY_MS", 1)
    engine = connect(f"sqlite:///{tmp_path / 'state.db'}")
    write = engine.execution_options(write=True)
    with write.begin() as connection:
        connection.execute(text("CREATE TABLE numbers (number INTEGER)"))

    def add(number: int) -> None:
        with write.begin() as connection:
            connection.execute(text("INSERT INTO numbers VALUES (:number)"), {"number": number})
            time.sleep(0.005)
            if number % 5 == 0:
                connection.rollback()

    with ThreadPoolExecutor(40) as pool:
        list(pool.map(add, range(200)))
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM numbers")).scalar() == 160
    engine.dispose()


def test_a_transaction_that_fails_gives_its_turn_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_BUSY_MS", 1)
    url = f"sqlite:///{tmp_path / 'state.db'}"
    mine, other = (connect(url).execution_options(write=True) for _ in range(2))
    for _ in range(2):
        with other.begin(), pytest.raises(OperationalError, match="locked"), mine.begin():
            pass
        with pytest.raises(ZeroDivisionError), mine.begin():
            raise ZeroDivisionError
    with mine.begin() as connection:
        connection.execute(text("CREATE TABLE numbers (number INTEGER)"))


def test_readers_wait_for_no_writer(tmp_path: Path) -> None:
    engine = connect(f"sqlite:///{tmp_path / 'state.db'}")
    read = threading.Event()

    def look() -> None:
        with engine.begin() as connection:
            connection.execute(text("SELECT count(*) FROM alembic_version")).scalar()
        read.set()

    with engine.execution_options(write=True).begin():
        thread = threading.Thread(target=look)
        thread.start()
        assert read.wait(30)
    thread.join()
    engine.dispose()
