"""Leases of rollout servers: shares, holds, handovers. Properties over arbitrary fleets on a clock of their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.jobs.leases import Account, Claim, Decision, Lease, Member, Terms, advance, decide, shares

TERMS = Terms(hold_s=10.0, switch_s=1.0, drain_s=3.0, deadline_s=5.0)


@dataclass
class World:
    """A fleet on a clock of its own; jobs let go of a server ``release_s`` after they were asked, or never."""

    terms: Terms
    members: list[Member]
    claims: list[Claim]
    release_s: float | None = 1.0
    tick: float = 1.0
    now: float = 0.0
    leases: dict[str, Lease] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[Lease, str, float]] = field(default_factory=list)
    granted: int = 0

    def step(self) -> None:
        """One tick, with what must hold of each."""
        self.accounts = advance(self.accounts, self.members, self.claims, self.leases.values(), self.tick)
        self.now += self.tick
        if self.release_s is not None:
            for lease in self.leases.values():
                if lease.asked is not None and self.now - lease.asked >= self.release_s:
                    self.leases[lease.server] = replace(lease, released=True)
        decision = decide(
            self.terms, self.members, self.claims, list(self.leases.values()), self.accounts, self.now
        )  # fmt: skip
        for lease, why in decision.ends:
            assert self.leases.pop(lease.server) == replace(lease)
            self.ended.append((lease, why, self.now))
        healthy = {member.name for member in self.members if member.healthy}
        wanting = {claim.job_id: claim for claim in self.claims if claim.wants}
        for server, job_id in decision.grants:
            assert server not in self.leases, "no server has two leases"
            assert server in healthy
            assert job_id in wanting
            self.tokens[server] += 1
            self.leases[server] = Lease(server, job_id, self.tokens[server], self.now)
            self.granted += 1
        for lease, why in decision.asks:
            assert self.leases[lease.server].asked is None
            assert why != "another job is owed more" or self.now - lease.since >= self.terms.least_s, "minimum hold"
            self.leases[lease.server] = replace(lease, asked=self.now)
        held = Counter(lease.job_id for lease in self.leases.values())
        for claim in wanting.values():
            assert claim.most is None or held[claim.job_id] <= claim.most

    def run(self, seconds: float) -> None:
        """So many seconds."""
        for _ in range(round(seconds / self.tick)):
            self.step()


def world(servers: int, weights: list[float], **more: object) -> World:
    members = [Member(f"s{at}") for at in range(servers)]
    claims = [Claim(f"j{at}", weight) for at, weight in enumerate(weights)]
    return World(TERMS, members, claims, **more)  # type: ignore[arg-type]


weights = st.lists(st.floats(0.5, 4.0), min_size=1, max_size=4)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), weights, st.sampled_from([0.0, 1.0, 4.0, None]))
def test_shares_come_within_five_percent_for_any_weights(
    servers: int, weights: list[float], release_s: float | None
) -> None:
    """Whether jobs let go at once, late, or never, so that the deadline has to pass."""
    found = world(servers, weights, release_s=release_s)
    owed = shares(found.claims, servers)
    # What a job may be off by is a few leases; so long that these are 5 % of the smallest share.
    found.run(max(600.0, 3 * (servers + 1) * TERMS.least_s / 0.05 / min(owed.values())))
    used = {claim.job_id: found.accounts[claim.job_id].used for claim in found.claims}
    total = sum(used.values())
    for job_id, seconds in used.items():
        assert seconds / total == pytest.approx(owed[job_id] / servers, rel=0.05)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 5), weights)
def test_nobody_starves_and_debts_stay_bounded(servers: int, weights: list[float]) -> None:
    found = world(servers, weights)
    last = dict.fromkeys((claim.job_id for claim in found.claims), 0.0)
    owed = shares(found.claims, servers)
    for _ in range(1500):
        found.step()
        for lease in found.leases.values():
            last[lease.job_id] = found.now
        for job_id, part in owed.items():
            # Within the time in which it is owed a lease, for each server and one more, it has had one.
            assert found.now - last[job_id] <= (servers + 2) * 2 * TERMS.least_s / part + 2 * TERMS.deadline_s
            assert abs(found.accounts[job_id].lag) <= (servers + 2) * (TERMS.least_s + TERMS.deadline_s)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens to servers and jobs, with the ticks until the next of it."""
    kinds = st.sampled_from(["die", "come", "idle", "wake", "sick", "well"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=25))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    histories(),
    st.sampled_from([0.5, 3.0, None]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_whatever_happens_a_server_has_one_lease(
    servers: int, history: list[tuple[str, int, int]], release_s: float | None, least: list[int]
) -> None:
    found = world(servers, [1.0, 2.0, 3.0], release_s=release_s)
    found.claims = [replace(claim, least=least[at]) for at, claim in enumerate(found.claims)]
    for kind, at, ticks in history:
        job_id, server = f"j{at}", f"s{at % servers}"
        if kind == "die":
            found.claims = [claim for claim in found.claims if claim.job_id != job_id]
        elif kind == "come" and all(claim.job_id != job_id for claim in found.claims):
            found.claims.append(Claim(job_id, 1.0 + at, least=least[at]))
        elif kind in ("idle", "wake"):
            found.claims = [replace(c, wants=kind == "wake") if c.job_id == job_id else c for c in found.claims]
        elif kind in ("sick", "well"):
            found.members = [replace(m, healthy=kind == "well") if m.name == server else m for m in found.members]
        found.run(ticks * found.tick)
        alive = {claim.job_id for claim in found.claims}
        assert {lease.job_id for lease in found.leases.values()} <= alive, "a dead job's leases have ended"
        for lease in found.leases.values():
            assert lease.asked is None or found.now - lease.asked < TERMS.deadline_s, "a deadline ends a lease"
    for lease, why, at_time in found.ended:
        if why == "not returned in time":
            assert lease.asked is not None
            assert at_time - lease.asked >= TERMS.deadline_s
        elif why == "returned":
            assert lease.released
    for account in found.accounts.values():
        assert account.used >= 0


@given(st.integers(0, 8), st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(0, 3), st.integers(1, 9)), max_size=6))
def test_shares_use_all_servers_within_bounds(servers: int, jobs: list[tuple[float, int, int]]) -> None:
    claims = [Claim(f"j{at}", w, min(low, high), high) for at, (w, low, high) in enumerate(jobs)]
    owed = shares(claims, servers)
    able = sum(min(claim.most or 0, servers) for claim in claims)
    assert sum(owed.values()) == pytest.approx(min(servers, able), abs=1e-6)
    fits = sum(claim.least for claim in claims) <= servers
    for claim in claims:
        assert owed[claim.job_id] <= (claim.most or 0) + 1e-9
        assert not fits or owed[claim.job_id] >= claim.least - 1e-9


def test_six_servers_are_dealt_by_weight_at_once_and_stay() -> None:
    found = world(6, [1, 2, 3])
    found.run(2000)
    assert Counter(lease.job_id for lease in found.leases.values()) == {"j0": 1, "j1": 2, "j2": 3}
    assert found.granted == 6, "nothing moves where nothing is to be gained"


def test_a_job_alone_keeps_its_servers_and_one_that_comes_gets_its_part() -> None:
    found = world(4, [1.0])
    found.run(60)
    assert Counter(lease.job_id for lease in found.leases.values()) == {"j0": 4}
    found.claims.append(Claim("j1", 3.0))
    found.run(20)
    assert Counter(lease.job_id for lease in found.leases.values()) == {"j0": 1, "j1": 3}


def test_a_dear_switch_makes_leases_longer() -> None:
    cheap, dear = world(1, [1, 1]), world(1, [1, 1])
    dear.terms = replace(TERMS, switch_s=10.0)
    for found in (cheap, dear):
        found.run(4000)
    assert cheap.granted > 5 * dear.granted
    assert min(lease.asked - lease.since for lease, _, _ in dear.ended if lease.asked is not None) >= 100.0


def test_lower_bounds_are_kept_and_those_that_do_not_fit_take_turns() -> None:
    found = world(3, [1.0, 8.0])
    found.claims[0] = replace(found.claims[0], least=1)
    found.run(10)
    for _ in range(2000):
        found.step()
        held = Counter(lease.job_id for lease in found.leases.values() if lease.asked is None)
        assert held["j0"] == 1
    tight = world(1, [1.0, 1.0])
    tight.claims = [replace(claim, least=1) for claim in tight.claims]
    tight.run(4000)
    assert tight.accounts["j0"].used == pytest.approx(tight.accounts["j1"].used, rel=0.05)


def test_a_job_that_finished_gives_all_back_and_one_without_a_process_at_once() -> None:
    found = world(2, [1.0, 1.0])
    found.run(5)
    found.claims[0] = replace(found.claims[0], wants=False)
    found.run(2)
    assert {lease.job_id for lease in found.leases.values()} == {"j1"}
    found.claims = found.claims[:1]
    found.step()
    assert found.leases == {}
    assert {why for _, why, _ in found.ended} == {"returned", "the job has no process"}


def test_a_server_that_does_not_answer_is_asked_back_and_not_granted() -> None:
    found = world(2, [1.0])
    found.run(3)
    found.members[0] = Member("s0", healthy=False)
    found.run(3)
    assert set(found.leases) == {"s1"}
    found.members[0] = Member("s0")
    found.run(1)
    assert found.leases["s0"].token == 2


def test_a_job_that_comes_owes_nothing_and_is_owed_nothing_by_those_that_left() -> None:
    """What the others are owed together is that of a job that is gone: only their differences count."""
    before = {"a": Account(lag=50.0), "b": Account(lag=30.0), "gone": Account(lag=-80.0)}
    after = advance(before, [Member("s0")], [Claim("a"), Claim("b"), Claim("new")], [], 0.0)
    assert {job_id: round(account.lag, 6) for job_id, account in after.items()} == pytest.approx(
        {"a": 70 / 3, "b": 10 / 3, "new": -80 / 3}, abs=1e-5
    )
    assert sum(account.lag for account in after.values()) == pytest.approx(0.0)


def test_a_server_on_its_way_is_not_asked_for_twice() -> None:
    members, claims = [Member("s0"), Member("s1")], [Claim("a"), Claim("b")]
    leases = [Lease("s0", "a", 1, 0.0, asked=98.0), Lease("s1", "a", 2, 0.0)]
    accounts = {"a": Account(lag=-2.0), "b": Account(lag=2.0)}  # more than a switch costs, less than a lease
    assert decide(TERMS, members, claims, leases, accounts, 100.0) == Decision([], [], [])


def test_a_job_at_its_lower_bound_keeps_it_whatever_it_had_before() -> None:
    members, claims = [Member("s0"), Member("s1")], [Claim("a", least=1), Claim("b")]
    leases = [Lease("s0", "a", 1, 0.0), Lease("s1", "b", 2, 0.0)]
    accounts = {"a": Account(lag=-500.0), "b": Account(lag=500.0)}
    assert decide(TERMS, members, claims, leases, accounts, 100.0).asks == []
    without = [Claim("a"), Claim("b")]
    assert [lease.server for lease, _ in decide(TERMS, members, without, leases, accounts, 100.0).asks] == ["s0"]


def test_a_job_gets_no_more_than_it_has_a_use_for() -> None:
    found = world(4, [5.0, 1.0])
    found.claims[0] = replace(found.claims[0], most=1)
    found.run(200)
    assert Counter(lease.job_id for lease in found.leases.values()) == {"j0": 1, "j1": 3}
    alone = world(3, [1.0])
    alone.claims[0] = replace(alone.claims[0], most=2)
    alone.run(200)
    assert (len(alone.leases), alone.granted) == (2, 2)
