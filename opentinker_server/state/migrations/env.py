"""Alembic environment: migrations run on the connection that the caller passes."""

from alembic import context

from opentinker_server.state.database import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
