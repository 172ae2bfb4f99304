"""The service on a real PostgreSQL server: schema, many writers at once, fences, and the server away for a while."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from nightshift.wire.events import read_events
from orchestrator.jobs.leases import Account, Decision, Terms
from orchestrator.jobs.states import Call, JobState, StateConflictError, ask
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.store.engine import HEAD, connect
from orchestrator.store.fleets import FleetServer, FleetStore, as_lease
from orchestrator.store.jobs import JobStore, NewJob
from orchestrator.store.schema import metadata
from orchestrator.store.state import FencedError, StateStore
from tests.fakes.run import FakeRun
from tests.fakes.service import ROOT, ROWS, digest, job, serve
from tests.fixtures.postgres import Postgres, postgres_bin
from tests.fixtures.tokenizer_k import write_folder

BIN = postgres_bin()
pytestmark = pytest.mark.skipif(BIN is None, reason="PostgreSQL is not installed (Debian: apt-get install postgresql)")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    assert BIN is not None
    with Postgres(BIN) as running:
        yield running


@pytest.fixture
def postgres(server: Postgres) -> Postgres:
    """The server with an empty database."""
    engine = connect(server.url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return server


def at_once(*works: Any) -> list[BaseException]:
    """Runs works in threads of their own; what they raised."""
    errors: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def new(job_id: str, **more: Any) -> NewJob:
    return NewJob(job_id, "p", "job", f"/runs/{job_id}", {"name": "job"}, "h", **more)


def test_one_schema_whoever_comes_first_and_from_wherever(postgres: Postgres) -> None:
    assert at_once(*[lambda: connect(postgres.url).dispose()] * 6) == []
    engine = connect(postgres.url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    with engine.begin() as connection:  # as a release before the service left it
        later = ("fleet_accounts", "fleet_leases", "fleet_servers", "fleets")
        for table in ("audit", "jobs", "tokens", "projects", "fences", "alembic_version", *later):
            connection.execute(text(f"DROP TABLE {table}"))
    engine.dispose()
    assert at_once(*[lambda: connect(postgres.url).dispose()] * 4) == []
    with connect(postgres.url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == HEAD


def test_a_fleet_is_lent_by_one_of_many_and_each_server_once(postgres: Postgres) -> None:
    stores = [FleetStore(connect(postgres.url)) for _ in range(6)]
    servers = [FleetServer(name, f"http://{name}", "NIGHTSHIFT_ROLLOUT_TOKEN") for name in "ab"]
    made = stores[0].put("night", Terms(), servers)
    tokens: list[int | None] = []
    works = [lambda at=at: tokens.append(stores[at].acquire("night", f"o{at}", 60)) for at in range(6)]
    assert at_once(*works) == []
    assert sorted(token for token in tokens if token is not None) == [1]
    grants = Decision(grants=[("a", "j1"), ("b", "j2")])
    wrote: list[bool] = []
    # The right token once, and those of lenders that were replaced, or are none: all at the same time.
    assert (
        at_once(*(lambda at=at: wrote.append(stores[at].settle("night", at, 5.0, {}, grants)) for at in range(6))) == []
    )
    assert sorted(wrote) == [False] * 5 + [True]
    first, second = stores[1].open_leases("night")
    assert (first.server, first.job_id, second.server, second.job_id) == ("a", "j1", "b", "j2")
    # A server that has a lease gets no second one, whoever asks: the whole decision is refused.
    errors = at_once(
        lambda: stores[0].settle("night", 1, 6.0, {"j9": Account(1.0, 1.0)}, Decision(grants=[("a", "j9")]))
    )
    assert [type(error).__name__ for error in errors] == ["IntegrityError"]
    assert stores[2].accounts("night") == {}
    handed = Decision(ends=[(as_lease(first, released=True), "returned")], grants=[("a", "j2")])
    assert stores[0].settle("night", 1, 7.0, {"j2": Account(2.0, -1.0)}, handed)
    assert [lease.job_id for lease in stores[3].open_leases("night")] == ["j2", "j2"]
    assert stores[3].open_leases("night")[0].number > second.number
    assert stores[3].accounts("night") == {"j2": Account(2.0, -1.0)}
    assert stores[4].get("night").counted == 7.0 > made.counted - made.created


def test_many_writers_at_once(postgres: Postgres) -> None:
    stores = [JobStore(connect(postgres.url)) for _ in range(3)]
    made: list[bool] = []

    def submit(at: int) -> None:
        made.append(stores[at % 3].create(new(f"j{at}", idempotency_key=f"k{at % 10}"))[1])

    assert at_once(*(lambda at=at: submit(at) for at in range(40))) == []
    assert made.count(True) == 10
    assert len(stores[0].waiting()) == 10
    job_id = stores[0].waiting()[0].job_id
    tokens: list[int | None] = []
    assert (
        at_once(*(lambda at=at: tokens.append(stores[at % 3].acquire(job_id, f"o{at}", 60)) for at in range(9))) == []
    )
    assert sorted(token for token in tokens if token is not None) == [1]

    def call(at: int) -> None:
        with suppress(StateConflictError):
            stores[at % 3].change(job_id, lambda status: ask(status, [Call.PAUSE, Call.RESUME, Call.CANCEL][at % 3]))

    assert at_once(*(lambda at=at: call(at) for at in range(12))) == []
    assert stores[0].get(job_id).state in (JobState.CANCELLED, JobState.PAUSED, JobState.RESUMING)


def test_a_fence_holds_off_whoever_is_writing(postgres: Postgres) -> None:
    stale, newer = StateStore(postgres.url, fence=1), StateStore(postgres.url, fence=2)
    stale.raise_fence("r", 1)
    outcomes: list[str] = []

    def write() -> None:
        for index in range(200):
            try:
                record = GroupRecord(index=index, row=0, epoch=0, trace_id="t", state=GroupState.TRAINED, step=1)
                stale.save_groups("r", [record])
                outcomes.append("written")
            except FencedError:
                outcomes.append("fenced")

    def replace() -> None:
        time.sleep(0.1)
        newer.raise_fence("r", 2)
        outcomes.append("replaced")

    assert at_once(write, replace) == []
    at = outcomes.index("replaced")
    # One write may have been noted by its thread after the fence rose, though it was committed before.
    assert "written" not in outcomes[at + 2 :]
    assert newer.balance("r")["trained"] == outcomes.count("written")


async def test_jobs_go_on_while_the_server_is_away(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with serve(tmp_path, database_url=postgres.url) as api:
        running = await api.submit(job("one", steps=60, step_s=0.05))
        waiting = [await api.submit(job(f"w{at}", steps=1)) for at in range(3)]
        await api.wait(running["id"], "running")
        await asyncio.to_thread(postgres.stop)
        refused = await api.http.post("/v1/jobs", json=job())
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert (await api.http.get("/readyz")).status_code == 503
        assert (await api.http.get("/healthz")).status_code == 200
        await asyncio.sleep(1.0)
        await asyncio.to_thread(postgres.start)
        for made in (running, *waiting):
            await api.wait(made["id"], "succeeded", limit_s=60)
        ledger = (await api.http.get(f"/v1/jobs/{running['id']}/ledger")).json()
        assert (ledger["trained"], ledger["balanced"]) == (60, True)
        await api.http.delete(f"/v1/jobs/{running['id']}")
        assert StateStore(postgres.url).balance(running["id"])["issued"] == 0


async def test_a_run_that_starts_while_the_server_is_away_waits_for_it(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_DATABASE_URL", postgres.url)
    pipeline = {"pipeline": {"role_timeout_s": 60.0}}
    async with FakeRun(tmp_path, run_id="late-20260101-000000-abcd", **pipeline) as run:
        await asyncio.to_thread(postgres.stop)
        going = asyncio.create_task(run.run(limit_s=120))
        await run.until(lambda: any("database away, waiting" in text for text in run.warnings()), "a warning", 60)
        await asyncio.to_thread(postgres.start)
        assert await going == 0, run.error()
    assert StateStore(postgres.url).balance(run.run_dir.name)["trained"] == 12


async def test_a_run_whose_server_stays_away_says_so(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_DATABASE_URL", postgres.url)
    async with FakeRun(tmp_path, pipeline={"role_timeout_s": 0.5}) as run:
        await asyncio.to_thread(postgres.stop)
        try:
            assert await run.run(limit_s=120) == 1
        finally:
            await asyncio.to_thread(postgres.start)
    assert "the database was away for 0.5 s" in run.error()


async def test_a_real_runner_waits_for_the_server_and_loses_nothing(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between fake services: no group is lost or trained twice, and the service answers clearly meanwhile."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = write_folder(tmp_path / "model")
    document = job(
        "real",
        steps=30,
        model={"path": str(model)},
        data={"train_files": [f"upload:{digest(ROWS)}/rows.jsonl"], "max_prompt_length": 64},
        rollout={"batch_size": 2, "n": 2, "max_response_length": 8},
        trainer={"total_steps": 30, "learning_rate": 2.0, "test_freq": 0},
        tracking={"tensorboard": False},
    )
    command = [sys.executable, "-m", "tests.fakes.session_process", "{folder}"]
    async with serve(tmp_path / "data", database_url=postgres.url, command=command, allowed=[tmp_path]) as api:
        made = await api.submit(document)
        await api.wait_step(made["id"], 3, limit_s=120)
        await asyncio.to_thread(postgres.stop)
        for path in (f"/v1/jobs/{made['id']}", f"/v1/jobs/{made['id']}/ledger", "/v1/jobs"):
            refused = await api.http.get(path)
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:nightshift:problem:database-away"
        log = tmp_path / "data" / "runs" / made["id"] / "events.jsonl"
        deadline = time.monotonic() + 60
        while not any("database away, waiting" in event.get("message", "") for event in read_events(log)):
            assert time.monotonic() < deadline, "the runner did not say that it waits"
            await asyncio.sleep(0.1)
        await asyncio.to_thread(postgres.start)
        done = await api.wait(made["id"], "succeeded", "failed", limit_s=240)
        assert (done["state"], done["step"]) == ("succeeded", 30), done["error"]
        ledger = (await api.http.get(f"/v1/jobs/{made['id']}/ledger")).json()
        assert (ledger["issued"], ledger["trained"], ledger["balanced"]) == (60, 60, True)
