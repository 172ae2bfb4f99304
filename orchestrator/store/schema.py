"""Tables of the orchestrator's state."""

from __future__ import annotations

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, Text

metadata = MetaData()

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
