"""Alembic's entry: runs the migrations on the connection, and in the transaction, that it is given."""

from alembic import context

from auth.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
