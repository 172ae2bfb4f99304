"""Alembic's entry: runs migrations on the connection that :mod:`orchestrator.store.migrate` hands over."""

from __future__ import annotations

from alembic import context

from orchestrator.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters tables by copying them
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
