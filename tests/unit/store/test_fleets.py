"""Fleets and leases in the database."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.exc import IntegrityError

from nightshift.wire.errors import BadInputError
from orchestrator.jobs.leases import Account, Decision, Terms
from orchestrator.store.fleets import FleetInUseError, FleetServer, FleetStore, UnknownFleetError, as_lease
from orchestrator.store.schema import fleet_leases
from tests.fixtures.clock import Clock

TERMS = Terms(10.0, 1.0, 2.0, 5.0)


@pytest.fixture
def store(database: Engine, clock: Clock) -> FleetStore:
    return FleetStore(database, clock)


def servers(*names: str) -> list[FleetServer]:
    return [FleetServer(name, f"http://{name}:8000", "NIGHTSHIFT_ROLLOUT_TOKEN") for name in names]


def test_a_fleet_is_made_changed_and_removed(store: FleetStore) -> None:
    made = store.put("night", TERMS, servers("a", "b"))
    assert (made.terms, [one.name for one in made.servers], made.counted) == (TERMS, ["a", "b"], 1000.0)
    changed = store.put("night", Terms(20.0, 1.0, 2.0, 5.0), servers("b", "c"))
    assert changed.terms.hold_s == 20.0
    assert store.all() == [changed] == [store.get("night")]
    with pytest.raises(BadInputError, match="belongs to another fleet"):
        store.put("day", TERMS, servers("c"))
    assert [fleet.name for fleet in store.all()] == ["night"], "a refused fleet leaves nothing"
    store.delete("night")
    with pytest.raises(UnknownFleetError, match="'night'"):
        store.get("night")


def test_leases_and_accounts_are_written_together_and_only_with_the_newest_token(
    store: FleetStore, clock: Clock
) -> None:
    store.put("night", TERMS, servers("a", "b"))
    token = store.acquire("night", "one", 10.0)
    assert token is not None
    grants = Decision(grants=[("a", "j1"), ("b", "j2")])
    assert store.settle("night", token, 1001.0, {"j1": Account(0.0, 0.0)}, grants)
    first, second = store.open_leases("night")
    assert (first.server, first.job_id, first.since, second.number) == ("a", "j1", 1001.0, first.number + 1)
    with pytest.raises(FleetInUseError, match="2 servers"):
        store.delete("night")
    asks = Decision(asks=[(as_lease(first, released=False), "another job is owed more")])
    assert store.settle("night", token, 1011.0, {"j1": Account(10.0, -2.0)}, asks)
    assert store.accounts("night") == {"j1": Account(10.0, -2.0)}
    assert store.get("night").counted == 1011.0
    ends = Decision(ends=[(as_lease(first, released=True), "returned")], grants=[("a", "j2")])
    assert store.settle("night", token, 1012.0, {}, ends), "a server may change hands in one decision"
    again, _ = store.open_leases("night")
    assert (again.job_id, again.number) == ("j2", second.number + 1)
    old = store.leases("night")[-1]
    assert (old.asked, old.ended, old.ended_why) == (1011.0, 1012.0, "returned")
    assert [lease.number for lease in store.leases("night", before=again.number, limit=1)] == [second.number]

    assert store.acquire("night", "two", 10.0) is None
    clock.now += 20.0
    newer = store.acquire("night", "two", 10.0)
    assert newer == token + 1
    assert not store.settle("night", token, 1030.0, {}, Decision(ends=[(as_lease(again, released=True), "returned")]))
    assert store.open_leases("night")[0] == again, "an orchestrator that was replaced changes nothing"


def test_an_owner_keeps_its_token_and_one_that_is_known_to_be_gone_is_replaced(store: FleetStore, clock: Clock) -> None:
    store.put("night", TERMS, servers("a"))
    assert store.acquire("night", "host/one", 10.0) == 1
    clock.now += 9.0
    assert store.acquire("night", "host/one", 10.0) == 1
    assert store.acquire("night", "host/two", 10.0, replaces="host/") == 2
    assert store.acquire("night", "host/one", 10.0) is None
    assert store.acquire("day", "host/one", 10.0) is None, "there is no such fleet"


def test_the_database_itself_refuses_a_second_lease_of_a_server(store: FleetStore, database: Engine) -> None:
    store.put("night", TERMS, servers("a"))
    rows = {"fleet": "night", "server": "a", "since": 1.0}
    with database.begin() as connection:
        connection.execute(insert(fleet_leases), {"job_id": "j1", **rows})
    with pytest.raises(IntegrityError), database.begin() as connection:
        connection.execute(insert(fleet_leases), {"job_id": "j2", **rows})
