"""Fleets, their servers and leases in SQL. Safe to call from several threads and several processes at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, Row, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from nightshift.wire.errors import BadInputError, NightshiftError
from orchestrator.jobs.leases import Account, Decision, Lease, Terms
from orchestrator.store.schema import fleet_accounts, fleet_leases, fleet_servers, fleets

#: Ended leases that are kept of each fleet, for whoever asks what happened.
_KEPT = 10_000


class UnknownFleetError(NightshiftError):
    """There is no such fleet."""


class FleetInUseError(NightshiftError):
    """Servers of the fleet are lent."""


@dataclass(frozen=True, slots=True)
class FleetServer:
    """A server by its URL; ``token_variable`` names the variable of the service's environment with its token."""

    name: str
    url: str
    token_variable: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet. ``created`` and ``counted`` are unix seconds: the accounts are kept up to ``counted``."""

    name: str
    terms: Terms
    servers: tuple[FleetServer, ...]
    created: float
    counted: float


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease, also one that has ended. Times are unix seconds."""

    number: int  # fencing token
    server: str
    job_id: str
    since: float
    asked: float | None
    asked_why: str
    ended: float | None
    ended_why: str


class FleetStore:
    """Fleets and what is lent of them.

    Args:
        engine: as :func:`orchestrator.store.engine.connect` makes it.
        clock: unix seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._write = engine.execution_options(write=True)
        self._clock = clock

    # Fleets -----------------------------------------------------------------------------------------------------------

    def put(self, name: str, terms: Terms, servers: Sequence[FleetServer]) -> Fleet:
        """Makes a fleet, or gives it other servers and terms. A lease on a server that is left out is asked back.

        Raises:
            BadInputError: a server belongs to another fleet.
        """
        now = self._clock()
        values = {"hold_s": terms.hold_s, "switch_s": terms.switch_s}
        values |= {"drain_s": terms.drain_s, "deadline_s": terms.deadline_s}
        try:
            with self._write.begin() as connection:
                if not connection.execute(update(fleets).where(fleets.c.name == name).values(values)).rowcount:
                    connection.execute(insert(fleets), {"name": name, "created": now, "counted": now, **values})
                connection.execute(delete(fleet_servers).where(fleet_servers.c.fleet == name))
                if servers:
                    rows = [
                        {"fleet": name, "name": one.name, "url": one.url, "token_variable": one.token_variable}
                        for one in servers
                    ]
                    connection.execute(insert(fleet_servers), rows)
                return self._get(connection, name)
        except IntegrityError as error:
            raise BadInputError(
                f"a server of fleet {name!r} belongs to another fleet",
                role="rollout",
                fix="A server is lent by one fleet: take it out of the other one first",
            ) from error

    def get(self, name: str) -> Fleet:
        """A fleet.

        Raises:
            UnknownFleetError: there is none.
        """
        with self._engine.begin() as connection:
            return self._get(connection, name)

    def all(self) -> list[Fleet]:
        """All fleets, by name."""
        with self._engine.begin() as connection:
            names = connection.execute(select(fleets.c.name).order_by(fleets.c.name)).scalars().all()
            return [self._get(connection, name) for name in names]

    def delete(self, name: str) -> None:
        """Removes a fleet that is not in use, with the history of its leases.

        Raises:
            UnknownFleetError: there is none.
            FleetInUseError: servers of it are lent.
        """
        with self._write.begin() as connection:
            self._get(connection, name)
            if lent := self._open(connection, name):
                raise FleetInUseError(
                    f"{len(lent)} servers of fleet {name!r} are lent, one to job {lent[0].job_id}",
                    role="rollout",
                    fix="End the jobs that use it first",
                )
            for table in (fleet_servers, fleet_leases, fleet_accounts):
                connection.execute(delete(table).where(table.c.fleet == name))
            connection.execute(delete(fleets).where(fleets.c.name == name))

    def _get(self, connection: Connection, name: str) -> Fleet:
        row = connection.execute(select(fleets).where(fleets.c.name == name)).first()
        if row is None:
            raise UnknownFleetError(f"there is no fleet {name!r}", role="rollout")
        query = select(fleet_servers).where(fleet_servers.c.fleet == name).order_by(fleet_servers.c.name)
        servers = tuple(FleetServer(one.name, one.url, one.token_variable) for one in connection.execute(query))
        terms = Terms(row.hold_s, row.switch_s, row.drain_s, row.deadline_s)
        return Fleet(row.name, terms, servers, row.created, row.counted)

    # Who lends --------------------------------------------------------------------------------------------------------

    def acquire(self, name: str, owner: str, ttl_s: float, *, replaces: str = "") -> int | None:
        """Takes or keeps the right to lend a fleet's servers; the fencing token, or None where another one has it.

        Args:
            owner: the orchestrator. It keeps its token as long as nobody else had the right in between.
            ttl_s: for so many seconds.
            replaces: owners whose name begins so are known to be gone.
        """
        now = self._clock()
        mine = update(fleets).where(fleets.c.name == name, fleets.c.lease_owner == owner, fleets.c.lease_until >= now)
        free = [fleets.c.lease_until < now, fleets.c.lease_owner == ""]
        if replaces:
            free.append(fleets.c.lease_owner.startswith(replaces, autoescape=True))
        taken = {"lease_owner": owner, "lease_until": now + ttl_s, "lease_token": fleets.c.lease_token + 1}
        with self._write.begin() as connection:
            if not connection.execute(mine.values(lease_until=now + ttl_s)).rowcount:
                condition = update(fleets).where(fleets.c.name == name, or_(*free))
                if not connection.execute(condition.values(taken)).rowcount:
                    return None
            return int(connection.execute(select(fleets.c.lease_token).where(fleets.c.name == name)).scalar_one())

    # Leases -----------------------------------------------------------------------------------------------------------

    def open_leases(self, name: str) -> list[LeaseRecord]:
        """Leases that have not ended, by server."""
        with self._engine.begin() as connection:
            return self._open(connection, name)

    def leases(self, name: str, *, before: int | None = None, limit: int = 100) -> list[LeaseRecord]:
        """Leases, also ended ones, the newest first."""
        query = select(fleet_leases).where(fleet_leases.c.fleet == name).order_by(fleet_leases.c.number.desc())
        if before is not None:
            query = query.where(fleet_leases.c.number < before)
        with self._engine.begin() as connection:
            return [_record(row) for row in connection.execute(query.limit(limit))]

    def accounts(self, name: str) -> dict[str, Account]:
        """What each job with a process had, up to ``counted`` of the fleet."""
        query = select(fleet_accounts).where(fleet_accounts.c.fleet == name)
        with self._engine.begin() as connection:
            return {row.job_id: Account(row.used, row.lag) for row in connection.execute(query)}

    def settle(self, name: str, token: int, now: float, accounts: Mapping[str, Account], decision: Decision) -> bool:
        """Writes accounts up to ``now`` and what was decided then, all or nothing.

        Args:
            token: of :meth:`acquire`; with an older one nothing is written, and False is returned.
        """
        with self._write.begin() as connection:
            mine = update(fleets).where(fleets.c.name == name, fleets.c.lease_token == token)
            if not connection.execute(mine.values(counted=now)).rowcount:
                return False
            connection.execute(delete(fleet_accounts).where(fleet_accounts.c.fleet == name))
            if accounts:
                rows = [{"fleet": name, "job_id": key, "used": a.used, "lag": a.lag} for key, a in accounts.items()]
                connection.execute(insert(fleet_accounts), rows)
            for lease, why in decision.ends:
                this = update(fleet_leases).where(fleet_leases.c.number == lease.token, fleet_leases.c.ended.is_(None))
                connection.execute(this.values(ended=now, ended_why=why))
            for lease, why in decision.asks:
                this = update(fleet_leases).where(fleet_leases.c.number == lease.token, fleet_leases.c.asked.is_(None))
                connection.execute(this.values(asked=now, asked_why=why))
            if decision.grants:
                rows = [{"fleet": name, "server": s, "job_id": j, "since": now} for s, j in decision.grants]
                connection.execute(insert(fleet_leases), rows)
                self._forget(connection, name)
            return True

    def _forget(self, connection: Connection, name: str) -> None:
        mine = fleet_leases.c.fleet == name
        query = select(fleet_leases.c.number).where(mine).order_by(fleet_leases.c.number.desc())
        oldest = connection.execute(query.offset(_KEPT).limit(1)).scalar()
        if oldest is not None:
            old = delete(fleet_leases).where(mine, fleet_leases.c.number <= oldest, fleet_leases.c.ended.is_not(None))
            connection.execute(old)

    def _open(self, connection: Connection, name: str) -> list[LeaseRecord]:
        query = select(fleet_leases).where(fleet_leases.c.fleet == name, fleet_leases.c.ended.is_(None))
        return [_record(row) for row in connection.execute(query.order_by(fleet_leases.c.server))]


def as_lease(record: LeaseRecord, *, released: bool) -> Lease:
    """A record as the rules of lending see it."""
    return Lease(record.server, record.job_id, record.number, record.since, record.asked, released)


def _record(row: Row[tuple[object, ...]]) -> LeaseRecord:
    return LeaseRecord(
        row.number, row.server, row.job_id, row.since, row.asked, row.asked_why, row.ended, row.ended_why
    )
