"""Which job holds which rollout server of a fleet, and for how long. Pure: times come in, decisions go out.

A server holds one job's weights at a time, so it is lent as a whole. What a job gets is counted in server-seconds, from
the grant of a lease to its end: whoever asks for a change pays for it. A job's lag is what it was owed by its weight,
out of all server-seconds that were lent while it wanted servers, less what it had. Servers go to the largest lag, and
are asked back from the smallest one where the gap is worth the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Terms:
    """How the servers of a fleet are lent. Times in seconds.

    Attributes:
        hold_s: for which a job keeps a server at least.
        switch_s: that a change of jobs costs a server: weights, and responses that end early.
        drain_s: after a server was asked back, for which responses may end there.
        deadline_s: after a server was asked back, from when the lease ends without a word of its job.
        overhead: largest share of a lease that the change may be: with dear changes, leases are longer than ``hold_s``.
    """

    hold_s: float = 300.0
    switch_s: float = 10.0
    drain_s: float = 30.0
    deadline_s: float = 90.0
    overhead: float = 0.1

    @property
    def least_s(self) -> float:
        """Shortest lease that a job is not done with by itself, in seconds."""
        return max(self.hold_s, self.switch_s / self.overhead)


@dataclass(frozen=True, slots=True)
class Member:
    """A server of the fleet."""

    name: str
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that has a process.

    Attributes:
        least: servers that it keeps as long as it wants any, where the fleet has so many for all.
        most: servers that it has a use for; None: all.
        wants: whether it has a use for servers now.
    """

    job_id: str
    weight: float = 1.0
    least: int = 0
    most: int | None = None
    wants: bool = True

    def has_room(self, held: int) -> bool:
        """Whether it has a use for one more."""
        return self.wants and (self.most is None or held < self.most)


@dataclass(frozen=True, slots=True)
class Lease:
    """One server in the hands of one job.

    Attributes:
        token: greater than that of each earlier lease of the server.
        since: when it was granted.
        asked: when it was asked back; None: it was not.
        released: whether its job has let go of it.
    """

    server: str
    job_id: str
    token: int
    since: float
    asked: float | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """What a job had, and what it is owed. In server-seconds.

    Attributes:
        used: that it held servers.
        lag: that it should have had beyond that; negative where it had more than its share.
    """

    used: float = 0.0
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to happen now.

    Attributes:
        ends: leases that are over, with the reason.
        grants: servers without a lease, and the jobs that get them.
        asks: leases to ask back, with the reason.
    """

    ends: Sequence[tuple[Lease, str]] = ()
    grants: Sequence[tuple[str, str]] = ()
    asks: Sequence[tuple[Lease, str]] = ()


def shares(claims: Iterable[Claim], servers: int) -> dict[str, float]:
    """Servers that each job is owed: by weight, within its bounds; together all servers, where they have a use.

    Water filling (Bertsekas and Gallager, Data Networks, section 6.5.2): a job whose part lies outside its bounds gets
    the bound, and the others share the rest. Lower bounds that do not fit together count for nothing.
    """
    wanting = [claim for claim in claims if claim.wants]
    floors = floors_of(wanting, servers)
    bounds = {
        claim.job_id: (float(floors[claim.job_id]), float(servers if claim.most is None else min(claim.most, servers)))
        for claim in wanting
    }
    target = min(float(servers), sum(high for _, high in bounds.values()))

    def filled(level: float) -> dict[str, float]:
        return {
            claim.job_id: min(max(level * claim.weight, bounds[claim.job_id][0]), bounds[claim.job_id][1])
            for claim in wanting
        }

    # The sum grows with the level, in straight lines between the levels at which a job meets a bound.
    bends = sorted({bound / claim.weight for claim in wanting for bound in bounds[claim.job_id]})
    below, under = 0.0, 0.0
    for bend in bends:
        over = sum(filled(bend).values())
        if over >= target:
            part = (target - under) / (over - under) if over > under else 1.0
            return filled(below + part * (bend - below))
        below, under = bend, over
    return filled(below)


def floors_of(claims: Iterable[Claim], servers: int) -> dict[str, int]:
    """Servers that are not taken from each job: its lower bound, or 0 for all where these do not fit together."""
    wanting = [claim for claim in claims if claim.wants]
    fits = sum(claim.least for claim in wanting) <= servers
    return {claim.job_id: claim.least if fits else 0 for claim in wanting}


def advance(
    accounts: Mapping[str, Account],
    members: Iterable[Member],
    claims: Sequence[Claim],
    leases: Iterable[Lease],
    seconds: float,
) -> dict[str, Account]:
    """Accounts of the jobs after ``seconds`` in which nothing changed. Those of jobs that are gone are closed."""
    healthy = {member.name for member in members if member.healthy}
    held = Counter(lease.job_id for lease in leases if lease.server in healthy)
    owed = shares(claims, len(healthy))
    total, lent = sum(owed.values()), seconds * sum(held[claim.job_id] for claim in claims)
    after: dict[str, Account] = {}
    for claim in claims:
        before, used = accounts.get(claim.job_id, Account()), seconds * held[claim.job_id]
        due = lent * owed.get(claim.job_id, 0.0) / total if total else used
        after[claim.job_id] = Account(before.used + used, before.lag + due - used)
    # Jobs come and go with what they are owed; for the others only the differences count.
    mean = sum(account.lag for account in after.values()) / len(after) if after else 0.0
    return {job_id: replace(account, lag=account.lag - mean) for job_id, account in after.items()}


def decide(
    terms: Terms,
    members: Sequence[Member],
    claims: Sequence[Claim],
    leases: Sequence[Lease],
    accounts: Mapping[str, Account],
    now: float,
) -> Decision:
    """What to grant, to ask back and to end at ``now``.

    A server whose lease ends now may be granted in the same decision. A job without a claim has no process any more.
    """
    healthy = {member.name for member in members if member.healthy}
    claimed = {claim.job_id: claim for claim in claims}
    ends = [(lease, why) for lease in leases if (why := _over(terms, lease, claimed, now))]
    ended = {lease.server for lease, _ in ends}
    going = [lease for lease in leases if lease.server not in ended]
    asks = [
        (lease, why) for lease in going if lease.asked is None and (why := _useless(lease, healthy, claimed))
    ]  # fmt: skip
    leaving = {lease.server for lease, _ in asks} | {lease.server for lease in going if lease.asked is not None}
    kept = [lease for lease in going if lease.server not in leaving]

    table = _Table(terms, claims, len(healthy), kept, accounts)
    taken = {lease.server for lease in going}
    grants: list[tuple[str, str]] = []
    for server in sorted(healthy - taken):
        if (job_id := table.neediest()) is not None:
            grants.append((server, job_id))
            table.give(job_id)
    for _ in healthy & leaving:  # on their way back: spoken for, and not asked for twice
        if (job_id := table.neediest()) is not None:
            table.give(job_id)
    movable = sorted(
        (lease for lease in kept if now - lease.since >= terms.least_s), key=lambda lease: (lease.since, lease.server)
    )
    while (move := table.move(movable)) is not None:
        movable.remove(move)
        asks.append((move, "another job is owed more"))
    return Decision(ends, grants, asks)


def _over(terms: Terms, lease: Lease, claimed: Mapping[str, Claim], now: float) -> str:
    if lease.job_id not in claimed:
        return "the job has no process"
    if lease.asked is not None and lease.released:
        return "returned"
    if lease.asked is not None and now >= lease.asked + terms.deadline_s:
        return "not returned in time"
    return ""


def _useless(lease: Lease, healthy: set[str], claimed: Mapping[str, Claim]) -> str:
    if lease.server not in healthy:
        return "the server does not answer"
    return "" if claimed[lease.job_id].wants else "the job has no use for it"


class _Table:
    """Jobs with what they hold, and how much each of them needs another server."""

    def __init__(
        self,
        terms: Terms,
        claims: Sequence[Claim],
        servers: int,
        kept: Iterable[Lease],
        accounts: Mapping[str, Account],
    ) -> None:
        self._terms = terms
        self._claims = {claim.job_id: claim for claim in claims if claim.wants}
        self._owed = shares(claims, servers)
        self._floors = floors_of(claims, servers)
        self._held = Counter(lease.job_id for lease in kept)
        self._lag = {job_id: accounts.get(job_id, Account()).lag for job_id in self._claims}

    def neediest(self) -> str | None:
        """The job that should get a server: one below its lower bound first."""
        able = [claim.job_id for claim in self._claims.values() if claim.has_room(self._held[claim.job_id])]
        return min(able, key=lambda job_id: (-self._short(job_id), -self._need(job_id), job_id), default=None)

    def give(self, job_id: str) -> None:
        """Counts one server more as a job's."""
        self._held[job_id] += 1

    def move(self, movable: Sequence[Lease]) -> Lease | None:
        """A lease that is to go to another job, counted as such; None where none is worth it."""
        to = self.neediest()
        lenders = [lease for lease in movable if lease.job_id != to and self._spare(lease.job_id)]
        if to is None or not lenders:
            return None
        lease = min(lenders, key=lambda lease: self._need(lease.job_id))  # of equals the first: the oldest
        # A server more or less changes a need by one lease: below that gap, the two would change places.
        gap = self._need(to) - self._need(lease.job_id)
        if not self._short(to) and gap <= self._terms.least_s + self._terms.switch_s:
            return None
        self._held[lease.job_id] -= 1
        self._held[to] += 1
        return lease

    def _need(self, job_id: str) -> float:
        """Server-seconds that a job will be owed after one more lease with what it holds now."""
        return self._lag[job_id] + (self._owed[job_id] - self._held[job_id]) * self._terms.least_s

    def _short(self, job_id: str) -> bool:
        return self._held[job_id] < self._floors[job_id]

    def _spare(self, job_id: str) -> bool:
        return self._held[job_id] > self._floors[job_id]
