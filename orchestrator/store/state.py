"""The run's state in SQL. Synchronous; the runner calls it from one thread of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from nightshift.wire.errors import NightshiftError
from nightshift.wire.version import Lineage
from orchestrator.runner.ledger import IN_FLIGHT, GroupRecord, GroupState
from orchestrator.store.engine import connect
from orchestrator.store.schema import fences, groups, runs

#: Environment of a run's processes: the fencing token with which the job service started them.
FENCE_VARIABLE = "NIGHTSHIFT_FENCE"


class FencedError(NightshiftError):
    """A newer process drives this run: this one may write nothing any more."""


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
        fence: token of this process, checked within each transaction that writes; None: that of the environment, and
            no check where there is none.
    """

    def __init__(self, url: str, fence: int | None = None) -> None:
        self._engine = connect(url)
        self._write = self._engine.execution_options(write=True)
        told = os.environ.get(FENCE_VARIABLE, "")
        self._fence = fence if fence is not None else int(told) if told.isdigit() else None

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
        with self._write.begin() as connection:
            connection.execute(delete(runs).where(runs.c.run_id == state.lineage.run))
            connection.execute(insert(runs), values)
            self._check(connection, state.lineage.run)

    def save_groups(self, run_id: str, records: Iterable[GroupRecord]) -> None:
        """Writes these records, all or none."""
        rows = [_row(run_id, record) for record in records]
        if not rows:
            return
        with self._write.begin() as connection:
            connection.execute(
                delete(groups).where(groups.c.run_id == run_id, groups.c.index.in_([row["index"] for row in rows]))
            )
            connection.execute(insert(groups), rows)
            self._check(connection, run_id)

    def check_fence(self, run_id: str) -> None:
        """Checks that this process is the newest one of the run.

        Raises:
            FencedError: it is not.
        """
        if self._fence is not None:
            with self._engine.begin() as connection:
                self._check(connection, run_id)

    def raise_fence(self, run_id: str, token: int) -> None:
        """Lets only processes with ``token`` or a newer one write for the run from now on.

        Raises:
            FencedError: a newer process was started already.
        """
        with self._write.begin() as connection:
            query = select(fences.c.token).where(fences.c.run_id == run_id).with_for_update()
            known = connection.execute(query).scalar()
            if known is None:
                connection.execute(insert(fences), {"run_id": run_id, "token": token})
            elif known > token:
                raise FencedError(f"run {run_id}: token {token} is older than {known}", role="orchestrator")
            else:
                connection.execute(update(fences).where(fences.c.run_id == run_id).values(token=token))

    def balance(self, run_id: str) -> dict[str, int]:
        """The terms of the ledger's equation, by name; all 0 for an unknown run."""
        query = select(groups.c.state, func.count()).where(groups.c.run_id == run_id).group_by(groups.c.state)
        with self._engine.begin() as connection:
            counts = {str(state): int(count) for state, count in connection.execute(query)}
        terms = {"issued": sum(counts.values()), "in_flight": sum(counts.get(state, 0) for state in IN_FLIGHT)}
        return terms | {str(state): counts.get(state, 0) for state in GroupState if state not in IN_FLIGHT}

    def forget(self, run_id: str) -> None:
        """Removes a run's rows."""
        with self._write.begin() as connection:
            for table in (groups, runs, fences):
                connection.execute(delete(table).where(table.c.run_id == run_id))

    def _check(self, connection: Connection, run_id: str) -> None:
        # Read after the writes: they hold SQLite's lock, and PostgreSQL's row lock makes a new process wait for us.
        if self._fence is None:
            return
        query = select(fences.c.token).where(fences.c.run_id == run_id).with_for_update(read=True)
        newest = connection.execute(query).scalar()
        if newest is not None and newest > self._fence:
            raise FencedError(
                f"this process (token {self._fence}) was replaced by another one (token {newest}) that drives the run "
                f"{run_id}",
                role="orchestrator",
            )

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()


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
