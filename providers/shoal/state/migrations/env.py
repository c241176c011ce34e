"""Alembic's entry point. It uses the open connection that `shoal.state.databases` passes."""

from alembic import context

from shoal.state.schema import Base

connection = context.config.attributes.get("connection")
if connection is None:
    # A developer has run `alembic revision --autogenerate` with -x url=..., the database to compare the tables with.
    from sqlalchemy import create_engine

    connection = create_engine(context.get_x_argument(as_dictionary=True)["url"]).connect()
context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
