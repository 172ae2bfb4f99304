"""The run's state in SQL. Synchronous; the runner calls it from one thread of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, create_engine, delete, event, insert, select

from nightshift.wire.version import Lineage
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.store.schema import groups, metadata, runs


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run knows of itself between two processes."""

    lineage: Lineage
    job_trace_id: str
    state: str


class StateStore:
    """Ledger and lineage of runs.

    Args:
        url: SQLAlchemy database URL, for instance ``sqlite:///<run>/state.db``.
    """

    def __init__(self, url: str) -> None:
        self._engine: Engine = create_engine(url)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _durable_sqlite)
        metadata.create_all(self._engine)

    def load(self, run_id: str) -> tuple[RunState | None, list[GroupRecord]]:
        """The run and its groups in issue order; None where the run is new."""
        with self._engine.begin() as connection:
            row = connection.execute(select(runs).where(runs.c.run_id == run_id)).mappings().first()
            found = connection.execute(select(groups).where(groups.c.run_id == run_id).order_by(groups.c.index))
            records = [_record(item) for item in found.mappings()]
        if row is None:
            return None, records
        branches = tuple((number, step) for number, step in json.loads(row["branches"]))
        return RunState(Lineage(run_id, row["lineage"], branches), row["job_trace_id"], row["state"]), records

    def save_run(self, state: RunState) -> None:
        """Writes the run's own row."""
        values = {
            "run_id": state.lineage.run,
            "lineage": state.lineage.number,
            "branches": json.dumps(state.lineage.branches),
            "job_trace_id": state.job_trace_id,
            "state": state.state,
            "updated": time.time(),
        }
        with self._engine.begin() as connection:
            connection.execute(delete(runs).where(runs.c.run_id == state.lineage.run))
            connection.execute(insert(runs), values)

    def save_groups(self, run_id: str, records: Iterable[GroupRecord]) -> None:
        """Writes these records, all or none."""
        rows = [_row(run_id, record) for record in records]
        if not rows:
            return
        with self._engine.begin() as connection:
            connection.execute(
                delete(groups).where(groups.c.run_id == run_id, groups.c.index.in_([row["index"] for row in rows]))
            )
            connection.execute(insert(groups), rows)

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()


def _durable_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()


def _row(run_id: str, record: GroupRecord) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "index": record.index,
        "row": record.row,
        "epoch": record.epoch,
        "trace_id": record.trace_id,
        "state": str(record.state),
        "step": record.step,
        "lineage": record.lineage,
        "reason": record.reason,
        "oldest_version": record.oldest_version,
        "newest_version": record.newest_version,
        "updated": time.time(),
    }


def _record(row: Any) -> GroupRecord:
    return GroupRecord(
        index=row["index"],
        row=row["row"],
        epoch=row["epoch"],
        trace_id=row["trace_id"],
        state=GroupState(row["state"]),
        step=row["step"],
        lineage=row["lineage"],
        reason=row["reason"],
        oldest_version=row["oldest_version"],
        newest_version=row["newest_version"],
    )
