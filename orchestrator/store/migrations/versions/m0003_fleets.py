"""Fleets of rollout servers, their leases, and what each job had of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "fleets",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("hold_s", sa.Float, nullable=False),
        sa.Column("switch_s", sa.Float, nullable=False),
        sa.Column("drain_s", sa.Float, nullable=False),
        sa.Column("deadline_s", sa.Float, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("counted", sa.Float, nullable=False),
        sa.Column("lease_owner", sa.String(200), nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("lease_token", sa.Integer, nullable=False),
    )
    op.create_table(
        "fleet_servers",
        sa.Column("fleet", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("token_variable", sa.String(128), nullable=False),
        sa.UniqueConstraint("url", name="uq_fleet_servers_url"),
    )
    op.create_table(
        "fleet_leases",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("fleet", sa.String(64), nullable=False),
        sa.Column("server", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.Column("asked", sa.Float),
        sa.Column("asked_why", sa.String(100), nullable=False),
        sa.Column("ended", sa.Float),
        sa.Column("ended_why", sa.String(100), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_fleet_leases_fleet_number", "fleet_leases", ["fleet", "number"])
    op.create_index(
        "uq_fleet_leases_open",
        "fleet_leases",
        ["fleet", "server"],
        unique=True,
        sqlite_where=sa.text("ended IS NULL"),
        postgresql_where=sa.text("ended IS NULL"),
    )
    op.create_table(
        "fleet_accounts",
        sa.Column("fleet", sa.String(64), primary_key=True),
        sa.Column("job_id", sa.String(128), primary_key=True),
        sa.Column("used", sa.Float, nullable=False),
        sa.Column("lag", sa.Float, nullable=False),
    )


def downgrade() -> None:
    """Drops the tables."""
    for name in ("fleet_accounts", "fleet_leases", "fleet_servers", "fleets"):
        op.drop_table(name)
