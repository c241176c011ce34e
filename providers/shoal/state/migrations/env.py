"""Alembic's entry: shoal hands it an open connection (see `shoal.state.migrate`)."""

from alembic import context

from shoal.state.schema import Base

connection = context.config.attributes.get("connection")
if connection is None:
    # `alembic revision --autogenerate` of a developer: compare with a database given by -x url=...
    from sqlalchemy import create_engine

    connection = create_engine(context.get_x_argument(as_dictionary=True)["url"]).connect()
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
