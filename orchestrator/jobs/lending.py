"""Lends the servers of fleets to running jobs: reads who wants what, decides, and writes it down where all can see it.

The database has the leases. A job learns of its own by a file in its run's folder, and answers in another one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightshift.cli.runs import EVENTS
from nightshift.wire.events import EventLog
from nightshift.wire.lease_file import LeasedServer, Released, read_released, write_leases
from orchestrator.jobs.leases import Account, Claim, Decision, Member, advance, decide
from orchestrator.jobs.pulse import Pulse
from orchestrator.store.fleets import Fleet, FleetStore, LeaseRecord, as_lease
from orchestrator.store.jobs import JobRecord, JobStore

_log = logging.getLogger(__name__)

#: Seconds after which accounts are written although nothing changed hands.
_WRITE_S = 5.0


@dataclass(slots=True)
class _Books:
    """What is known of a fleet since this orchestrator lends it.

    Attributes:
        token: fencing token of the right to lend.
        renewed: when that right was last taken or kept, in unix seconds.
        at: up to when ``accounts`` are kept, in unix seconds.
        seen: claims and servers as they were then; they held until the next look.
    """

    token: int
    renewed: float
    at: float
    accounts: dict[str, Account]
    seen: tuple[list[Member], list[Claim]] | None = None
    told: dict[str, list[LeasedServer]] = field(default_factory=dict)  # by job, as its file says


class Lender:
    """Looks at all fleets with each :meth:`tick`.

    Args:
        owner: this orchestrator, unlike any other.
        replaces: beginning of the names of orchestrators that are known to be gone.
        lease_s: how long an orchestrator that went silent keeps the right to lend a fleet's servers.
        clock: unix seconds.
    """

    def __init__(
        self,
        jobs: JobStore,
        fleets: FleetStore,
        pulse: Pulse,
        *,
        owner: str,
        replaces: str = "",
        lease_s: float = 15.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jobs = jobs
        self._fleets = fleets
        self._pulse = pulse
        self._owner = owner
        self._replaces = replaces
        self._lease_s = lease_s
        self._clock = clock
        self._books: dict[str, _Books] = {}

    def tick(self) -> None:
        """One look at all fleets."""
        fleets = self._fleets.all()
        self._pulse.watch(server.url for fleet in fleets for server in fleet.servers)
        for gone in self._books.keys() - {fleet.name for fleet in fleets}:
            del self._books[gone]
        if not fleets:
            return
        active = self._jobs.active()
        for fleet in fleets:
            mine = [record for record in active if (terms := fleet_of(record.spec)) and terms["name"] == fleet.name]
            if (books := self._have_right(fleet)) is not None:
                self._lend(fleet, books, mine)

    def close(self) -> None:
        """Ends the questions to servers. Leases stay: their jobs go on."""
        self._pulse.close()

    def _have_right(self, fleet: Fleet) -> _Books | None:
        """The books of a fleet that this orchestrator may lend; None: another one does."""
        now = self._clock()
        books = self._books.get(fleet.name)
        if books is not None and now - books.renewed < self._lease_s / 3:
            return books
        token = self._fleets.acquire(fleet.name, self._owner, self._lease_s, replaces=self._replaces)
        if token is None:
            self._books.pop(fleet.name, None)
            return None
        if books is None or books.token != token:
            books = _Books(token, now, fleet.counted, self._fleets.accounts(fleet.name))
            self._books[fleet.name] = books
        books.renewed = now
        return books

    def _lend(self, fleet: Fleet, books: _Books, records: list[JobRecord]) -> None:
        now = self._clock()
        answers = {record.id: read_released(Path(record.run_dir)) for record in records}
        claims = [claim_of(record, answers[record.id]) for record in records]
        records_of = self._fleets.open_leases(fleet.name)
        lent = {lease.server for lease in records_of}
        members = [  # a server that is at work is not taken away because this process has just begun to ask
            Member(server.name, self._pulse.healthy(server.url, unasked=server.name in lent))
            for server in fleet.servers
        ]
        nothing = Released()
        leases = [
            as_lease(lease, released=lease.number in answers.get(lease.job_id, nothing).leases) for lease in records_of
        ]
        # What was seen at the last look held until now; after a restart, what is seen now.
        before = books.seen or (members, claims)
        accounts = advance(books.accounts, *before, leases, max(0.0, now - books.at))
        decision = decide(fleet.terms, members, claims, leases, accounts, now)
        changes = bool(decision.ends or decision.grants or decision.asks)
        if changes or now - fleet.counted >= _WRITE_S:
            if not self._fleets.settle(fleet.name, books.token, now, accounts, decision):
                _log.warning("the servers of fleet %s are lent by another orchestrator now", fleet.name)
                del self._books[fleet.name]
                return
            records_of = self._fleets.open_leases(fleet.name)
        books.accounts, books.at, books.seen = accounts, now, (members, claims)
        self._tell_events(records, decision)
        self._tell_jobs(fleet, books, records, records_of)

    def _tell_jobs(
        self, fleet: Fleet, books: _Books, records: Iterable[JobRecord], leases: Iterable[LeaseRecord]
    ) -> None:
        """Writes each job's file where it says something else. What cannot be written is written at the next look."""
        servers = {server.name: server for server in fleet.servers}
        entries: dict[str, list[LeasedServer]] = {record.id: [] for record in records}
        for lease in leases:
            server = servers.get(lease.server)
            if server is None or lease.job_id not in entries:
                continue  # taken out of the fleet: the job lets go of what is not listed
            until = lease.asked + fleet.terms.drain_s if lease.asked is not None else None
            token = os.environ.get(server.token_variable, "")
            entries[lease.job_id].append(
                LeasedServer(server.name, server.url, lease.number, token, until, round(fleet.created * 1000))
            )
        for record in records:
            if books.told.get(record.id) == entries[record.id]:
                continue
            try:
                write_leases(Path(record.run_dir), entries[record.id])
                books.told[record.id] = entries[record.id]
            except OSError as error:
                _log.warning("job %s: its leases could not be written: %s", record.id, error)
        for gone in books.told.keys() - entries.keys():
            del books.told[gone]

    def _tell_events(self, records: Iterable[JobRecord], decision: Decision) -> None:
        """Writes what changed into the jobs' events."""
        folders = {record.id: Path(record.run_dir) for record in records}
        told = [(job_id, "leased", server, "") for server, job_id in decision.grants]
        told += [(lease.job_id, "asked_back", lease.server, why) for lease, why in decision.asks]
        told += [(lease.job_id, "ended", lease.server, why) for lease, why in decision.ends]
        for job_id, state, server, why in told:
            if (folder := folders.get(job_id)) is None:
                continue
            try:
                with EventLog(folder / EVENTS, job_id) as events:
                    events.append("lease", state=state, server=server, detail=why)
            except OSError as error:
                _log.warning("job %s: the lease of %s could not be told: %s", job_id, server, error)


def fleet_of(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Section ``rollout.fleet`` of a stored job; None: it has servers of its own."""
    found = (spec.get("rollout") or {}).get("fleet")
    return dict(found) if found else None


def claim_of(record: JobRecord, answer: Released | None = None) -> Claim:
    """What a job asks of its fleet; without ``answer``, what its folder says now."""
    answer = answer or read_released(Path(record.run_dir))
    terms = fleet_of(record.spec) or {}
    return Claim(record.id, terms["weight"], terms["min_servers"], terms["max_servers"], wants=answer.wants)
