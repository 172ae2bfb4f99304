"""The lender: what it reads of jobs, writes for them and keeps in the database, over restarts and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from nightshift.wire.events import read_events
from nightshift.wire.lease_file import LeasedServer, Released, read_leases, write_released
from orchestrator.jobs.fleet_file import read_fleets, register
from orchestrator.jobs.leases import Terms
from orchestrator.jobs.lending import Lender
from orchestrator.jobs.pulse import Pulse
from orchestrator.jobs.states import Happening, observe
from orchestrator.store.engine import connect
from orchestrator.store.fleets import FleetServer, FleetStore
from orchestrator.store.jobs import JobStore, NewJob
from tests.fixtures.clock import Clock

TERMS = Terms(hold_s=10.0, switch_s=1.0, drain_s=3.0, deadline_s=20.0)


class Answers(Pulse):
    """Servers that answer, or not, as the test says; one that is not listed was not asked yet."""

    def __init__(self, urls: dict[str, bool]) -> None:
        super().__init__()
        self.urls = urls

    def watch(self, urls: Any) -> None:
        pass

    def healthy(self, url: str, *, unasked: bool = False) -> bool:
        return self.urls.get(url, unasked)


class World:
    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.clock = Clock()
        self.jobs = JobStore(engine, self.clock)
        self.fleets = FleetStore(engine, self.clock)
        self.pulse = Answers({"http://a": True, "http://b": True})
        self.fleet("a", "b")
        self.lender = self.another("host/one")

    def fleet(self, *names: str) -> None:
        """Makes the fleet one of these servers."""
        servers = [FleetServer(name, f"http://{name}", "NIGHTSHIFT_ROLLOUT_TOKEN") for name in names]
        self.fleets.put("night", TERMS, servers)

    def another(self, owner: str, replaces: str = "") -> Lender:
        return Lender(self.jobs, self.fleets, self.pulse, owner=owner, replaces=replaces, clock=self.clock)

    def job(self, name: str, weight: float = 1.0, **more: Any) -> Path:
        """A job that runs and wants servers; its folder."""
        fleet = {"name": "night", "weight": weight, "min_servers": 0, "max_servers": None, **more}
        run_dir = self.folder / name
        run_dir.mkdir()
        self.jobs.create(NewJob(name, "p", "job", str(run_dir), {"rollout": {"fleet": fleet}}, "h"))
        self.jobs.change(name, lambda status: observe(status, Happening.LAUNCHED))
        write_released(run_dir, Released(wants=True))
        return run_dir

    def tick(self, seconds: float = 0.5) -> None:
        self.clock.now += seconds
        self.lender.tick()

    def until_asked(self, run_dir: Path) -> None:
        for _ in range(100):
            if any(server.break_off is not None for server in read_leases(run_dir)):
                return
            self.tick(1.0)
        raise AssertionError("nothing was asked back")

    def held(self, run_dir: Path) -> list[str]:
        return sorted(server.name for server in read_leases(run_dir) if server.break_off is None)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("NIGHTSHIFT_ROLLOUT_TOKEN", "secret")
    return World(tmp_path, connect(f"sqlite:///{tmp_path / 'state.db'}"))


def test_a_job_gets_servers_lets_go_and_another_one_gets_them(world: World) -> None:
    world.fleet("a")
    first = world.job("first")
    world.tick()
    assert world.held(first) == ["a"]
    entry = read_leases(first)[0]
    assert entry == LeasedServer("a", "http://a", entry.lease, "secret", epoch=entry.epoch)
    assert entry.epoch == round(world.fleets.get("night").created * 1000)
    assert oct((first / "leases.json").stat().st_mode)[-3:] == "600", "it holds a token"
    second = world.job("second")
    world.tick()
    assert world.held(second) == []
    world.until_asked(first)
    (asked,) = [server for server in read_leases(first) if server.break_off is not None]
    assert asked.break_off == world.clock.now + TERMS.drain_s
    world.tick()
    assert world.held(second) == [], "not before the first has let go"
    write_released(first, Released(True, frozenset({asked.lease})))
    world.tick()
    assert [server.name for server in read_leases(second)] == [asked.name]
    assert read_leases(first) == []
    told = [(event["state"], event["server"]) for event in read_events(first / "events.jsonl")]
    assert told == [("leased", "a"), ("asked_back", "a"), ("ended", "a")]


def test_what_a_job_has_let_go_of_without_being_asked_stays_its_own(world: World) -> None:
    first = world.job("first")
    world.tick()
    write_released(first, Released(True, frozenset(server.lease for server in read_leases(first))))
    world.tick()
    assert world.held(first) == ["a", "b"]


def test_a_job_that_hangs_loses_its_server_after_the_deadline(world: World) -> None:
    world.fleet("a")
    first = world.job("first")
    world.tick()
    second = world.job("second")
    world.until_asked(first)
    for _ in range(21):
        world.tick(1.0)
    assert world.held(second) == ["a"]
    assert [lease.ended_why for lease in world.fleets.leases("night") if lease.ended] == ["not returned in time"]
    assert read_leases(first) == []


def test_the_leases_of_a_job_without_a_process_end(world: World) -> None:
    world.job("first")
    world.tick()
    world.jobs.change("first", lambda status: observe(status, Happening.VANISHED))
    world.tick()
    assert world.fleets.open_leases("night") == []


def test_another_lender_goes_on_where_the_first_was_killed(world: World) -> None:
    first, second = world.job("first", weight=3.0), world.job("second")
    world.tick()
    before, held = world.fleets.open_leases("night"), world.held(first)
    world.tick(6.0)
    world.lender = world.another("host/two")
    world.tick(1.0)
    assert world.fleets.leases("night") == before[::-1], "the first has the right to lend for some time yet"
    world.pulse.urls = {}  # nobody was asked yet
    world.lender = world.another("host/three", replaces="host/")
    world.tick(2.0)
    assert world.fleets.open_leases("night") == before
    assert world.held(first) == held
    world.pulse.urls = {"http://a": True, "http://b": True}
    for _ in range(20):
        world.tick(0.5)
    used = world.fleets.accounts("night")
    # Two servers all the time, the restart included; accounts are written every five seconds.
    assert used["first"].used == pytest.approx(2 * (world.clock.now - 1000.5), abs=11.0)
    assert (world.held(second), used["second"].used) == ([], 0.0)


def test_a_lender_that_was_replaced_changes_nothing(world: World) -> None:
    world.job("first")
    world.tick()
    old, world.lender = world.lender, world.another("host/two", replaces="host/")
    world.tick(1.0)
    before = world.fleets.leases("night")
    world.jobs.change("first", lambda status: observe(status, Happening.VANISHED))
    old.tick()
    assert world.fleets.leases("night") == before
    world.tick()
    assert world.fleets.open_leases("night") == []


def test_a_file_that_cannot_be_written_is_written_at_the_next_look(world: World) -> None:
    first = world.job("first")
    (first / "leases.json").mkdir()
    world.tick()
    assert len(world.fleets.open_leases("night")) == 2
    (first / "leases.json").rmdir()
    world.tick()
    assert world.held(first) == ["a", "b"]


def test_a_server_that_is_taken_out_of_the_fleet_is_let_go_of(world: World) -> None:
    first = world.job("first")
    world.tick()
    world.fleet("a")
    world.tick()
    world.tick()
    assert [server.name for server in read_leases(first)] == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("night: {servers: [{name: a}]}", "night.servers.0.url is missing"),
        ("night: {servers: [], hold_s: .nan}", "night.hold_s"),
        ("../night: {servers: []}", "must match"),
        ("night: [", "is no YAML"),
        ("- night", "fleets.yaml is ['night'], but must be a map"),
    ],
)
def test_a_file_of_fleets_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "fleets.yaml"
    path.write_text(text)
    with pytest.raises(Exception, match="the file of fleets") as caught:
        read_fleets(path)
    assert says in str(caught.value)


def test_a_file_of_fleets(world: World, tmp_path: Path) -> None:
    path = tmp_path / "fleets.yaml"
    path.write_text(json.dumps({"day": {"servers": [{"name": "c", "url": "http://c:8000/"}], "hold_s": 60}}))
    register(world.fleets, read_fleets(path))
    day, night = world.fleets.all()
    assert (day.terms.hold_s, day.servers[0].url, night.name) == (60.0, "http://c:8000", "night")
