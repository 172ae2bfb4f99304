"""The job service: projects, tokens, jobs with their leases, fences and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Makes the tables."""
    op.create_table(
        "fences",
        sa.Column("run_id", sa.String(128), primary_key=True),
        sa.Column("token", sa.Integer, nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("max_running", sa.Integer),
        sa.Column("max_waiting", sa.Integer),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64)),
        sa.Column("scopes", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float),
        sa.Column("revoked", sa.Boolean, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("wish", sa.String(20), nullable=False),
        sa.Column("vanished", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("submitter", sa.String(64), nullable=False),
        sa.Column("submitted", sa.Float, nullable=False),
        sa.Column("started", sa.Float),
        sa.Column("ended", sa.Float),
        sa.Column("updated", sa.Float, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("exit_code", sa.Integer),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("traceparent", sa.String(64), nullable=False),
        sa.Column("lease_owner", sa.String(200), nullable=False),
        sa.Column("lease_until", sa.Float, nullable=False),
        sa.Column("lease_token", sa.Integer, nullable=False),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sa.UniqueConstraint("project", "idempotency_key", name="uq_jobs_project_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.create_index("ix_jobs_project_number", "jobs", ["project", "number"])
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("ix_audit_target", "audit", ["target"])


def downgrade() -> None:
    """Drops the tables."""
    for name in ("audit", "jobs", "tokens", "projects", "fences"):
        op.drop_table(name)
