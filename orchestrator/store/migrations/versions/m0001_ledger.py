"""The ledger: runs and their prompt groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "groups",
        sa.Column("run_id", sa.String(128), primary_key=True),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("row", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("trace_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("lineage", sa.Integer),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("oldest_version", sa.String(160), nullable=False),
        sa.Column("newest_version", sa.String(160), nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(128), primary_key=True),
        sa.Column("lineage", sa.Integer, nullable=False),
        sa.Column("branches", sa.Text, nullable=False),
        sa.Column("job_trace_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Drops the tables."""
    op.drop_table("runs")
    op.drop_table("groups")
