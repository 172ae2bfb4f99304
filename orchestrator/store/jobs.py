"""Jobs in SQL. Synchronous and safe to call from several threads and several processes at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row, delete, func, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError

from nightshift.wire.errors import NightshiftError
from orchestrator.jobs.queue import Waiting
from orchestrator.jobs.states import ACTIVE, ENDED, WAITING, JobState, Status, Wish
from orchestrator.store.schema import jobs, projects

_TRIES = 50
#: What a column of 32 bits holds.
_MOST_STEPS = 2**31 - 1


class UnknownJobError(NightshiftError):
    """There is no such job, or the caller may not see it."""


class IdempotencyError(NightshiftError):
    """The idempotency key was used before, with another submission."""


class QuotaError(NightshiftError):
    """The project has as many jobs waiting as it may have."""


class LeaseLostError(NightshiftError):
    """Another orchestrator drives the job now."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job. Times are unix seconds."""

    number: int  # grows with each submission
    id: str
    project: str
    name: str
    status: Status
    priority: int
    submitter: str
    submitted: float
    started: float | None
    ended: float | None
    updated: float
    step: int
    steps: int
    error: str
    exit_code: int | None
    run_dir: str
    spec: dict[str, Any]
    traceparent: str
    lease_owner: str
    lease_until: float
    lease_token: int

    @property
    def state(self) -> JobState:
        """Where the job is."""
        return self.status.state


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a submission brings."""

    id: str
    project: str
    name: str
    run_dir: str
    spec: dict[str, Any]
    body_hash: str
    priority: int = 0
    submitter: str = ""
    idempotency_key: str | None = None
    traceparent: str = ""


class JobStore:
    """Jobs, their states and leases.

    Args:
        engine: as :func:`orchestrator.store.engine.connect` makes it.
        clock: unix seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._write = engine.execution_options(write=True)
        self._clock = clock

    # Submission -------------------------------------------------------------------------------------------------------

    def submitted_before(self, project: str, key: str, body_hash: str) -> JobRecord | None:
        """The job that this idempotency key made.

        Raises:
            IdempotencyError: its submission was another one.
        """
        with self._engine.begin() as connection:
            return self._by_key(connection, project, key, body_hash)

    def create(self, new: NewJob) -> tuple[JobRecord, bool]:
        """Enters a job; returns it, and whether it is new. The same idempotency key makes one job.

        Raises:
            IdempotencyError: the key came with another submission before.
            QuotaError: the project has as many jobs waiting as it may have.
        """
        now = self._clock()
        values = {
            "id": new.id,
            "project": new.project,
            "name": new.name,
            **_columns(Status()),
            "priority": new.priority,
            "submitter": new.submitter,
            "submitted": now,
            "updated": now,
            "run_dir": new.run_dir,
            "spec": json.dumps(new.spec),
            "body_hash": new.body_hash,
            "idempotency_key": new.idempotency_key,
            "traceparent": new.traceparent,
        }
        try:
            with self._write.begin() as connection:
                key = new.idempotency_key
                if key is not None and (known := self._by_key(connection, new.project, key, new.body_hash)):
                    return known, False
                self._check_quota(connection, new.project)
                connection.execute(insert(jobs), values)
                return self._get(connection, new.id), True
        except IntegrityError:
            # PostgreSQL: the same key came in at the same time through another connection.
            if new.idempotency_key is None:
                raise
            known = self.submitted_before(new.project, new.idempotency_key, new.body_hash)
            if known is None:
                raise
            return known, False

    def _by_key(self, connection: Connection, project: str, key: str, body_hash: str) -> JobRecord | None:
        query = select(jobs).where(jobs.c.project == project, jobs.c.idempotency_key == key)
        row = connection.execute(query).first()
        if row is None:
            return None
        if row.body_hash != body_hash:
            raise IdempotencyError(
                f"the Idempotency-Key {key!r} came with another submission before (job {row.id})",
                role="job",
                fix="Use a new key for a new job",
            )
        return _record(row)

    def _check_quota(self, connection: Connection, project: str) -> None:
        limit = connection.execute(select(projects.c.max_waiting).where(projects.c.name == project)).scalar()
        if limit is None:
            return
        waiting = select(func.count()).where(jobs.c.project == project, jobs.c.state.in_(_names(WAITING)))
        count = connection.execute(waiting).scalar_one()
        if count >= limit:
            raise QuotaError(f"the project {project!r} has {count} jobs waiting, and may have {limit}", role="job")

    # Reading ----------------------------------------------------------------------------------------------------------

    def get(self, job_id: str, project: str | None = None) -> JobRecord:
        """A job; with ``project``, only one of that project.

        Raises:
            UnknownJobError: there is none.
        """
        with self._engine.begin() as connection:
            return self._get(connection, job_id, project)

    def _get(self, connection: Connection, job_id: str, project: str | None = None) -> JobRecord:
        query = select(jobs).where(jobs.c.id == job_id)
        if project is not None:
            query = query.where(jobs.c.project == project)
        row = connection.execute(query).first()
        if row is None:
            raise UnknownJobError(f"there is no job {job_id!r}", role="job")
        return _record(row)

    def find(
        self,
        *,
        project: str | None = None,
        states: Iterable[JobState] = (),
        name: str | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> list[JobRecord]:
        """Jobs, the newest first, without their job files (``spec`` is empty).

        Args:
            project: only of this project.
            states: only in one of these states; empty: all.
            name: only with this name.
            before: only with a smaller number, for the next page.
            limit: most jobs.
        """
        columns = [literal("{}").label("spec") if column is jobs.c.spec else column for column in jobs.c]
        query = select(*columns).order_by(jobs.c.number.desc()).limit(limit)
        if project is not None:
            query = query.where(jobs.c.project == project)
        if wanted := _names(states):
            query = query.where(jobs.c.state.in_(wanted))
        if name is not None:
            query = query.where(jobs.c.name == name)
        if before is not None:
            query = query.where(jobs.c.number < before)
        with self._engine.begin() as connection:
            return [_record(row) for row in connection.execute(query)]

    def of_project(self, project: str, job_ids: Iterable[str]) -> set[str]:
        """Of these jobs, those of a project."""
        query = select(jobs.c.id).where(jobs.c.project == project, jobs.c.id.in_(list(job_ids)))
        with self._engine.begin() as connection:
            return set(connection.execute(query).scalars())

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        with self._engine.begin() as connection:
            found = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state))
            return {str(state): int(count) for state, count in found}

    def waiting(self) -> list[Waiting]:
        """Jobs that wait for their turn."""
        query = select(jobs.c.id, jobs.c.project, jobs.c.priority, jobs.c.number)
        with self._engine.begin() as connection:
            found = connection.execute(query.where(jobs.c.state.in_(_names(WAITING))))
            return [Waiting(*row) for row in found]

    def active(self) -> list[JobRecord]:
        """Jobs that have a process, or had one when their orchestrator was last heard of."""
        query = select(jobs).where(jobs.c.state.in_(_names(ACTIVE))).order_by(jobs.c.number)
        with self._engine.begin() as connection:
            return [_record(row) for row in connection.execute(query)]

    # Changing ---------------------------------------------------------------------------------------------------------

    def change(
        self,
        job_id: str,
        rule: Callable[[Status], Status],
        *,
        project: str | None = None,
        token: int | None = None,
        **values: Any,
    ) -> JobRecord:
        """Takes a job to the status that ``rule`` makes of its present one, however many others do so at once.

        Args:
            project: only if the job is of this project.
            token: only while this is the job's fencing token.
            values: further columns to set.

        Raises:
            UnknownJobError: there is no such job.
            LeaseLostError: the token is an older one.
            StateConflictError: from the rule.
        """
        for _ in range(_TRIES):
            before = self.get(job_id, project)
            if token is not None and before.lease_token != token:
                raise LeaseLostError(f"job {job_id} is driven by {before.lease_owner}", role="orchestrator")
            after = rule(before.status)
            now = self._clock()
            columns = {**_columns(after), "updated": now, **values}
            if after.state in ENDED:
                columns.setdefault("ended", before.ended if before.state is after.state and before.ended else now)
            elif before.state in ENDED:  # resumed
                columns |= {"ended": None, "error": "", "exit_code": None}
            same = [getattr(jobs.c, name) == value for name, value in _columns(before.status).items()]
            condition = update(jobs).where(jobs.c.id == job_id, jobs.c.lease_token == before.lease_token, *same)
            with self._write.begin() as connection:
                if connection.execute(condition.values(columns)).rowcount:
                    return self._get(connection, job_id)
        raise NightshiftError(f"job {job_id} changed {_TRIES} times while it was to be changed", role="orchestrator")

    def progress(self, job_id: str, token: int, step: int, steps: int) -> None:
        """Notes how far a job is."""
        with self._write.begin() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id, jobs.c.lease_token == token)
                .values(step=min(step, _MOST_STEPS), steps=min(steps, _MOST_STEPS), updated=self._clock())
            )

    def delete(self, job_id: str, project: str | None = None) -> JobRecord:
        """Removes a job that has ended, and returns what it was.

        Raises:
            UnknownJobError: there is none.
        """
        with self._write.begin() as connection:
            record = self._get(connection, job_id, project)
            connection.execute(delete(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(_names(ENDED))))
            return record

    # Leases -----------------------------------------------------------------------------------------------------------

    def acquire(self, job_id: str, owner: str, ttl_s: float, *, replaces: str = "") -> int | None:
        """Takes the lease of a job for ``ttl_s`` seconds; None where another owner holds it.

        Args:
            owner: who drives the job from now on.
            replaces: owners whose name begins so are known to be gone: their leases need not run out.

        Returns:
            The fencing token, greater than any before.
        """
        now = self._clock()
        free = [jobs.c.lease_until < now, jobs.c.lease_owner == owner, jobs.c.lease_owner == ""]
        if replaces:
            free.append(jobs.c.lease_owner.startswith(replaces, autoescape=True))
        condition = update(jobs).where(jobs.c.id == job_id, or_(*free))
        values: Mapping[str, Any] = {
            "lease_owner": owner,
            "lease_until": now + ttl_s,
            "lease_token": jobs.c.lease_token + 1,
        }
        with self._write.begin() as connection:
            if not connection.execute(condition.values(values)).rowcount:
                return None
            return self._get(connection, job_id).lease_token

    def renew(self, job_id: str, token: int, ttl_s: float) -> bool:
        """Keeps a lease; False where it was taken by another owner."""
        condition = update(jobs).where(jobs.c.id == job_id, jobs.c.lease_token == token)
        with self._write.begin() as connection:
            return bool(connection.execute(condition.values(lease_until=self._clock() + ttl_s)).rowcount)

    def release(self, job_id: str, token: int) -> None:
        """Gives a lease back; nothing where it was lost already."""
        condition = update(jobs).where(jobs.c.id == job_id, jobs.c.lease_token == token)
        with self._write.begin() as connection:
            connection.execute(condition.values(lease_owner="", lease_until=0.0))


def _names(states: Iterable[JobState]) -> list[str]:
    return [str(state) for state in states]


def _columns(status: Status) -> dict[str, Any]:
    return {"state": str(status.state), "wish": str(status.wish), "vanished": status.vanished}


def _record(row: Row[Any]) -> JobRecord:
    return JobRecord(
        number=row.number,
        id=row.id,
        project=row.project,
        name=row.name,
        status=Status(JobState(row.state), Wish(row.wish), row.vanished),
        priority=row.priority,
        submitter=row.submitter,
        submitted=row.submitted,
        started=row.started,
        ended=row.ended,
        updated=row.updated,
        step=row.step,
        steps=row.steps,
        error=row.error,
        exit_code=row.exit_code,
        run_dir=row.run_dir,
        spec=json.loads(row.spec),
        traceparent=row.traceparent,
        lease_owner=row.lease_owner,
        lease_until=row.lease_until,
        lease_token=row.lease_token,
    )
