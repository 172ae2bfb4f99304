"""Connections to the database, and its schema brought up to date."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, inspect, text

from nightshift.wire.errors import BadInputError, NightshiftError
from orchestrator.store.schema import metadata


class SpoiltDatabaseError(NightshiftError):
    """The file of the database is damaged, or none: waiting for it does not help."""


_MIGRATIONS = Path(__file__).parent / "migrations"
#: Revision of the tables in ``schema.py``; a test holds the two together.
HEAD = "0003"
#: Any number: the lock under which one process migrates a PostgreSQL database.
_LOCK = 0x6E6967687473
#: Connections that are kept, and more for a moment: together as many as the service has threads (40) and its own.
_POOL, _OVERFLOW = 15, 30
#: For which SQLite waits for another process's write lock, in milliseconds, and a writer for its turn, in seconds.
_BUSY_MS, _TURN_S = 10_000, 60.0
_TURN = "nightshift.turn"
#: SQLite's codes for a file that is damaged, or none of its own: waiting does not mend it.
_SPOILT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def connect(url: str) -> Engine:
    """An engine for a SQLAlchemy database URL, with the schema brought up to date.

    Transactions that are begun with ``engine.execution_options(write=True)`` take SQLite's write lock at once, so that
    two of them wait for each other instead of one failing. Those of one process take turns before they ask for it:
    SQLite has no queue, and of hundreds that try again and again some would never get it in time.

    Raises:
        BadInputError: the URL is none, or names a driver that is not installed; a later release made the database.
        SpoiltDatabaseError: the file is damaged, or no database. Also later, of any statement.
        OperationalError: the database does not answer.
    """
    try:
        engine = create_engine(url, pool_pre_ping=True, pool_size=_POOL, max_overflow=_OVERFLOW)
    except Exception as error:  # SQLAlchemy: ArgumentError, NoSuchModuleError; drivers: ImportError
        raise BadInputError(
            f"NIGHTSHIFT_DATABASE_URL cannot be used: {str(error).splitlines()[0]}",
            role="orchestrator",
            fix="For example sqlite:////var/lib/nightshift/state.db or postgresql+psycopg://user@host/database",
        ) from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "handle_error", _name_what_is_spoilt)
        event.listen(engine, "connect", _durable_sqlite)
        turns = _Turns()
        event.listen(engine, "begin", turns.begin)
        for over in ("checkin", "invalidate"):  # the connection goes back: what it had begun is committed, or is not
            event.listen(engine, over, turns.end)
    migrate(engine)
    return engine


def migrate(engine: Engine) -> None:
    """Makes the tables, or takes those of an older release to this one's."""
    # Looked at before any lock is taken: readers of a run's ledger and its writer must not wait for each other.
    with engine.begin() as connection:
        if "alembic_version" in inspect(connection).get_table_names() and _revision(connection) == HEAD:
            return
    with engine.execution_options(write=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        tables = set(inspect(connection).get_table_names())
        found = _revision(connection) if "alembic_version" in tables else None
        if found == HEAD:
            return
        if found is not None and found > HEAD:
            raise BadInputError(
                f"a later release made the database {connection.engine.url.database!r} (schema {found}, this one knows "
                f"those up to {HEAD})",
                role="orchestrator",
                fix="Use that release, or the copy of the database from before it",
            )
        if found is None and "groups" not in tables:
            metadata.create_all(connection)
            _stamp(connection, HEAD)
            return
        if found is None:  # a ledger that was made before there were migrations
            _stamp(connection, "0001")
        _upgrade(connection)


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _stamp(connection: Connection, revision: str) -> None:
    connection.execute(
        text(
            "CREATE TABLE IF NOT EXISTS alembic_version "
            "(version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text("DELETE FROM alembic_version"))
    connection.execute(text("INSERT INTO alembic_version (version_num) VALUES (:revision)"), {"revision": revision})


def _name_what_is_spoilt(context: ExceptionContext) -> None:
    error = context.original_exception
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _SPOILT:
        database = context.engine.url.database if context.engine is not None else ""
        raise SpoiltDatabaseError(
            f"the database {database!r} cannot be read: {error}",
            role="orchestrator",
            fix="Restore the file from a copy; the run's checkpoints and rollouts are files of their own",
        ) from error


def _durable_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say, not where the driver guesses
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


class _Turns:
    """One writing transaction of this process at a time; the database's own lock is between processes."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def begin(self, connection: Connection) -> None:
        """Begins a transaction; a writing one waits for its turn."""
        if not connection.get_execution_options().get("write"):
            connection.exec_driver_sql("BEGIN")
            return
        # Where its turn does not come, it asks SQLite itself, which says that the database is locked.
        connection.info[_TURN] = self._turn.acquire(timeout=_TURN_S)
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except BaseException:
            self._release(connection.info)
            raise

    def end(self, _connection: Any, record: Any, *_error: Any) -> None:
        """Lets the next one have its turn."""
        self._release(record.info)

    def _release(self, info: Any) -> None:
        if info.pop(_TURN, False):
            self._turn.release()
