"""Tables of the orchestrator's state. A change here needs a migration beside it (``migrations/versions``)."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text, UniqueConstraint, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# The ledger of runs: one database for all, or one file in each run's folder. -----------------------------------------

groups = Table(
    "groups",
    metadata,
    Column("run_id", String(128), primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("row", Integer, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("trace_id", String(32), nullable=False),
    Column("state", String(20), nullable=False),
    Column("step", Integer),
    Column("lineage", Integer),
    Column("reason", Text, nullable=False, default=""),
    Column("oldest_version", String(160), nullable=False, default=""),
    Column("newest_version", String(160), nullable=False, default=""),
    Column("updated", Float, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("run_id", String(128), primary_key=True),
    Column("lineage", Integer, nullable=False),
    # JSON: [[lineage, last step], ...] of the branches that were left.
    Column("branches", Text, nullable=False),
    Column("job_trace_id", String(32), nullable=False),
    Column("state", String(20), nullable=False),
    Column("updated", Float, nullable=False),
)

#: The newest process that may write for a run: a process with a lower token is a leftover and cannot commit.
fences = Table(
    "fences",
    metadata,
    Column("run_id", String(128), primary_key=True),
    Column("token", Integer, nullable=False),
)

# The job service ------------------------------------------------------------------------------------------------------

projects = Table(
    "projects",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("max_running", Integer),
    Column("max_waiting", Integer),
    Column("created", Float, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(64), nullable=False),
    # Null: all projects.
    Column("project", String(64)),
    Column("scopes", String(64), nullable=False),
    # SHA-256 of the secret, which is 256 random bits.
    Column("hash", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
    Column("revoked", Boolean, nullable=False, default=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("project", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("state", String(20), nullable=False),
    Column("wish", String(20), nullable=False),
    Column("vanished", Integer, nullable=False, default=0),
    Column("priority", Integer, nullable=False, default=0),
    Column("submitter", String(64), nullable=False, default=""),
    Column("submitted", Float, nullable=False),
    Column("started", Float),
    Column("ended", Float),
    Column("updated", Float, nullable=False),
    Column("step", Integer, nullable=False, default=0),
    Column("steps", Integer, nullable=False, default=0),
    Column("error", Text, nullable=False, default=""),
    Column("exit_code", Integer),
    Column("run_dir", Text, nullable=False),
    # JSON: the job with its defaults.
    Column("spec", Text, nullable=False),
    Column("idempotency_key", String(255)),
    Column("body_hash", String(64), nullable=False),
    Column("traceparent", String(64), nullable=False, default=""),
    # Who drives the job, until when, and the fencing token, which grows with each new holder.
    Column("lease_owner", String(200), nullable=False, default=""),
    Column("lease_until", Float, nullable=False, default=0.0),
    Column("lease_token", Integer, nullable=False, default=0),
    UniqueConstraint("project", "idempotency_key"),
    Index(None, "state"),
    Index(None, "project", "number"),
    sqlite_autoincrement=True,
)

audit = Table(
    "audit",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("actor", String(100), nullable=False),
    Column("project", String(64), nullable=False, default=""),
    Column("action", String(64), nullable=False),
    Column("target", String(200), nullable=False, default=""),
    # JSON
    Column("detail", Text, nullable=False, default="{}"),
    Index(None, "target"),
)

# Fleets of rollout servers, lent to jobs ------------------------------------------------------------------------------

fleets = Table(
    "fleets",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("hold_s", Float, nullable=False),
    Column("switch_s", Float, nullable=False),
    Column("drain_s", Float, nullable=False),
    Column("deadline_s", Float, nullable=False),
    Column("created", Float, nullable=False),
    # Up to when the accounts of the jobs are kept.
    Column("counted", Float, nullable=False),
    # The orchestrator that lends the servers, as it is for jobs.
    Column("lease_owner", String(200), nullable=False, default=""),
    Column("lease_until", Float, nullable=False, default=0.0),
    Column("lease_token", Integer, nullable=False, default=0),
)

fleet_servers = Table(
    "fleet_servers",
    metadata,
    Column("fleet", String(64), primary_key=True),
    Column("name", String(64), primary_key=True),
    # Of one fleet alone: two would lend it twice.
    Column("url", Text, nullable=False, unique=True),
    # Variable of the service's environment that holds the server's token.
    Column("token_variable", String(128), nullable=False),
)

fleet_leases = Table(
    "fleet_leases",
    metadata,
    # Also the fencing token.
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("fleet", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("job_id", String(128), nullable=False),
    Column("since", Float, nullable=False),
    Column("asked", Float),
    Column("asked_why", String(100), nullable=False, default=""),
    Column("ended", Float),
    Column("ended_why", String(100), nullable=False, default=""),
    Index(None, "fleet", "number"),
    # A server has one lease at a time, whoever writes.
    Index(
        "uq_fleet_leases_open",
        "fleet",
        "server",
        unique=True,
        sqlite_where=text("ended IS NULL"),
        postgresql_where=text("ended IS NULL"),
    ),
    sqlite_autoincrement=True,
)

#: What each job with a process had of a fleet, and is owed, in server-seconds.
fleet_accounts = Table(
    "fleet_accounts",
    metadata,
    Column("fleet", String(64), primary_key=True),
    Column("job_id", String(128), primary_key=True),
    Column("used", Float, nullable=False),
    Column("lag", Float, nullable=False),
)
