"""The database: migrations, fences, jobs, tokens."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

from nightshift.wire.errors import BadInputError
from nightshift.wire.version import Lineage
from orchestrator.jobs.states import Call, Happening, JobState, StateConflictError, Status, ask, observe
from orchestrator.runner.ledger import GroupRecord, GroupState
from orchestrator.store import engine as engine_module
from orchestrator.store.access import AccessStore, Scope
from orchestrator.store.engine import HEAD, SpoiltDatabaseError, connect
from orchestrator.store.jobs import (
    IdempotencyError,
    JobStore,
    LeaseLostError,
    NewJob,
    QuotaError,
    UnknownJobError,
)
from orchestrator.store.schema import metadata
from orchestrator.store.state import FencedError, RunState, StateStore
from tests.fixtures.clock import Clock

MIGRATIONS = Path(engine_module.__file__).parent / "migrations"


@pytest.fixture
def store(database: Engine, clock: Clock) -> JobStore:
    return JobStore(database, clock)


def new(job_id: str = "a", project: str = "p", **values) -> NewJob:
    return NewJob(job_id, project, "job", f"/runs/{job_id}", {"name": "job"}, values.pop("body_hash", "h"), **values)


# Migrations -----------------------------------------------------------------------------------------------------------


def test_the_last_migration_is_the_one_that_the_schema_stands_for() -> None:
    script = ScriptDirectory(str(MIGRATIONS))
    assert script.get_current_head() == HEAD
    assert [revision.revision for revision in script.walk_revisions()] == ["0003", "0002", "0001"]


def test_migrations_make_what_the_schema_says(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    # As releases before the job service made it.
    old.executescript(
        'CREATE TABLE groups (run_id VARCHAR(128) NOT NULL, "index" INTEGER NOT NULL, row INTEGER NOT NULL, '
        "epoch INTEGER NOT NULL, trace_id VARCHAR(32) NOT NULL, state VARCHAR(20) NOT NULL, step INTEGER, "
        "lineage INTEGER, reason TEXT NOT NULL, oldest_version VARCHAR(160) NOT NULL, newest_version VARCHAR(160) NOT "
        'NULL, updated FLOAT NOT NULL, PRIMARY KEY (run_id, "index"));'
        "CREATE TABLE runs (run_id VARCHAR(128) NOT NULL, lineage INTEGER NOT NULL, branches TEXT NOT NULL, "
        "job_trace_id VARCHAR(32) NOT NULL, state VARCHAR(20) NOT NULL, updated FLOAT NOT NULL, PRIMARY KEY (run_id));"
        "INSERT INTO runs VALUES ('r', 1, '[]', 't', 'running', 0.0);"
    )
    old.close()
    for _ in range(2):
        migrated = connect(f"sqlite:///{path}")
    with migrated.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == HEAD
    state, _ = StateStore(f"sqlite:///{path}").load("r")
    assert state is not None
    assert state.lineage.number == 1


def test_a_new_database_equals_a_migrated_one(tmp_path: Path) -> None:
    fresh = connect(f"sqlite:///{tmp_path / 'fresh.db'}")
    path = tmp_path / "migrated.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);"
            "INSERT INTO alembic_version VALUES ('0001')"
        )
        for table in ("groups", "runs"):
            with fresh.connect() as other:
                connection.execute(other.execute(text(f"SELECT sql FROM sqlite_master WHERE name='{table}'")).scalar())
    migrated = connect(f"sqlite:///{path}")
    left, right = inspect(fresh), inspect(migrated)
    assert left.get_table_names() == right.get_table_names()
    for table in left.get_table_names():
        assert [(c["name"], str(c["type"]), c["nullable"]) for c in left.get_columns(table)] == [
            (c["name"], str(c["type"]), c["nullable"]) for c in right.get_columns(table)
        ]
        for kind in ("get_indexes", "get_unique_constraints"):
            names = [sorted(item["name"] for item in getattr(side, kind)(table)) for side in (left, right)]
            assert names[0] == names[1]


def test_processes_that_start_at_once_make_one_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    errors: list[BaseException] = []

    def start() -> None:
        try:
            connect(url).dispose()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("url", ["nonsense", "nosuchdriver://x", "postgresql+nosuch://x"])
def test_a_database_url_that_is_none_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(BadInputError, match="NIGHTSHIFT_DATABASE_URL"):
        connect(url)


def test_a_database_of_a_later_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    connect(f"sqlite:///{path}").dispose()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099'")
    for _ in range(2):
        with pytest.raises(BadInputError, match=f"later release .*state.db.*schema 0099.*{HEAD}"):
            connect(f"sqlite:///{path}")


@pytest.mark.parametrize("spoil", ["no database", "half", "overwritten"])
def test_a_file_that_is_spoilt_is_refused_by_name(tmp_path: Path, spoil: str) -> None:
    path = tmp_path / "state.db"
    connect(f"sqlite:///{path}").dispose()
    whole = path.read_bytes()
    path.write_bytes(
        {
            "no database": b"no database" * 500,
            "half": whole[: len(whole) // 2],
            "overwritten": whole[:4096] + b"\xaa" * (len(whole) - 4096),
        }[spoil]
    )
    with pytest.raises(SpoiltDatabaseError, match=r"state\.db' cannot be read: .*(malformed|not a database)"):
        StateStore(f"sqlite:///{path}").load("r")


# The ledger's fence ---------------------------------------------------------------------------------------------------


def test_a_stale_process_cannot_commit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    stale, newer = StateStore(url, fence=1), StateStore(url, fence=2)
    record = GroupRecord(index=0, row=0, epoch=0, trace_id="t")
    stale.raise_fence("r", 1)
    stale.save_groups("r", [record])
    newer.raise_fence("r", 2)
    for write in (
        lambda: stale.save_groups("r", [GroupRecord(index=1, row=1, epoch=0, trace_id="t")]),
        lambda: stale.save_run(RunState(Lineage("r"), "t", "running")),
        lambda: stale.check_fence("r"),
        lambda: stale.raise_fence("r", 1),
    ):
        with pytest.raises(FencedError):
            write()
    newer.check_fence("r")
    newer.save_run(RunState(Lineage("r"), "t", "running"))
    state, records = newer.load("r")
    assert state is not None
    assert [item.index for item in records] == [0], "what the stale process wrote was taken back"
    StateStore(url).save_groups("other", [record])  # a run without the service has no fence


def test_the_token_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'state.db'}"
    monkeypatch.setenv("NIGHTSHIFT_FENCE", "3")
    store = StateStore(url)
    store.raise_fence("r", 4)
    with pytest.raises(FencedError, match="token 3"):
        store.check_fence("r")


def test_balance_counts_by_state(tmp_path: Path) -> None:
    store = StateStore(f"sqlite:///{tmp_path / 'state.db'}")
    states = [GroupState.TRAINED, GroupState.TRAINED, GroupState.RUNNING, GroupState.FAILED, GroupState.READY]
    store.save_groups(
        "r", [GroupRecord(index=i, row=i, epoch=0, trace_id="t", state=state) for i, state in enumerate(states)]
    )
    balance = store.balance("r")
    assert (balance["issued"], balance["trained"], balance["in_flight"], balance["failed"]) == (5, 2, 2, 1)
    assert store.balance("nobody")["issued"] == 0
    store.forget("r")
    assert store.balance("r")["issued"] == 0


# Jobs -----------------------------------------------------------------------------------------------------------------


def test_a_key_makes_one_job(store: JobStore) -> None:
    first, created = store.create(new("a", idempotency_key="k"))
    again, created_again = store.create(new("b", idempotency_key="k"))
    assert (created, created_again, again.id) == (True, False, first.id)
    with pytest.raises(IdempotencyError, match="job a"):
        store.create(new("c", idempotency_key="k", body_hash="other"))
    other, _ = store.create(new("d", project="q", idempotency_key="k"))
    assert other.id == "d", "keys are a project's own"


def test_many_submissions_at_once_are_all_queued_once(store: JobStore) -> None:
    def submit(at: int) -> None:
        for _ in range(2):
            store.create(new(f"j{at}", idempotency_key=f"k{at}"))

    threads = [threading.Thread(target=submit, args=(at,)) for at in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.job_id for job in store.waiting()) == sorted(f"j{at}" for at in range(30))


def test_a_project_may_have_so_many_waiting(store: JobStore, database: Engine) -> None:
    AccessStore(database).put_project("p", max_waiting=1)
    store.create(new("a"))
    with pytest.raises(QuotaError, match="may have 1"):
        store.create(new("b"))
    store.create(new("c", project="q"))


def test_pages_and_filters(store: JobStore) -> None:
    for name in "abcde":
        store.create(new(name, project="p" if name < "d" else "q"))
    store.change("b", lambda status: ask(status, Call.CANCEL))
    page = store.find(limit=2)
    assert [job.id for job in page] == ["e", "d"]
    assert [job.id for job in store.find(limit=2, before=page[-1].number)] == ["c", "b"]
    assert [job.id for job in store.find(project="p", states=[JobState.QUEUED])] == ["c", "a"]
    assert store.counts() == {"queued": 4, "cancelled": 1}


def test_what_is_of_another_project_is_not_there(store: JobStore) -> None:
    store.create(new("a"))
    for call in (
        lambda: store.get("a", "q"),
        lambda: store.change("a", lambda status: ask(status, Call.CANCEL), project="q"),
        lambda: store.delete("a", "q"),
    ):
        with pytest.raises(UnknownJobError):
            call()


def test_a_lease_passes_on_with_a_greater_token(store: JobStore, clock: Clock) -> None:
    store.create(new("a"))
    first = store.acquire("a", "one", 10)
    assert first == 1
    assert store.acquire("a", "two", 10) is None
    assert store.renew("a", first, 10)
    clock.now += 11
    second = store.acquire("a", "two", 10)
    assert second == 2
    assert not store.renew("a", first, 10)
    with pytest.raises(LeaseLostError, match="two"):
        store.change("a", lambda status: observe(status, Happening.LAUNCHED), token=first)
    store.release("a", first)
    assert store.get("a").lease_owner == "two"
    assert store.change("a", lambda status: observe(status, Happening.LAUNCHED), token=second).state == "starting"
    assert store.acquire("a", "one", 10, replaces="tw") == 3, "an owner that is known to be gone need not run out"


def test_resuming_clears_how_it_ended(store: JobStore) -> None:
    store.create(new("a"))
    failed = store.change("a", lambda _: Status(JobState.FAILED), error="no", exit_code=1)
    assert failed.ended is not None
    resumed = store.change("a", lambda status: ask(status, Call.RESUME))
    assert (resumed.state, resumed.error, resumed.ended, resumed.exit_code) == ("resuming", "", None, None)


def test_concurrent_calls_make_one_history(store: JobStore) -> None:
    store.create(new("a"))
    outcomes: list[str] = []

    def call(name: Call) -> None:
        try:
            outcomes.append(str(store.change("a", lambda status: ask(status, name)).state))
        except StateConflictError as error:
            outcomes.append(f"refused: {error.state}")

    threads = [threading.Thread(target=call, args=(name,)) for name in [Call.PAUSE, Call.RESUME, Call.CANCEL] * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 15
    assert store.get("a").state in ("cancelled", "resuming", "paused")


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_tokens_are_hashed_and_compared(database: Engine, clock: Clock) -> None:
    access = AccessStore(database, clock)
    token, secret = access.create_token("ci", [Scope.READ, Scope.SUBMIT], "p", expires=2000.0)
    with database.connect() as connection:
        stored = [str(value) for row in connection.execute(text("SELECT * FROM tokens")) for value in row]
    assert secret.split("_", 2)[2] not in " ".join(stored)
    assert access.check_token(secret) == token
    for wrong in (secret[:-1], secret + "x", "", "ns_", "ns_x_y", secret.replace("ns_", "xx_"), "é" * 10, "a" * 999):
        assert access.check_token(wrong) is None
    clock.now = 2000.0
    assert access.check_token(secret) is None, "expired"
    clock.now = 1500.0
    access.revoke_token(token.id)
    assert access.check_token(secret) is None


def test_the_audit_log_keeps_order(database: Engine) -> None:
    access = AccessStore(database)
    for at in range(3):
        access.note("me", "job.cancel", f"job-{at}", reason="no")
    assert [entry["target"] for entry in access.notes(limit=2)] == ["job-2", "job-1"]
    assert access.notes(target="job-0")[0]["detail"] == {"reason": "no"}
