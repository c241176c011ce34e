"""Opening the store and its transactions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from shoal.state import engines
from shoal.state.explain import explain, too_new
from shoal.state.home import home
from shoal.state.locks import file_lock
from shoal.state.signals import uninterrupted

SCHEMA_VERSION = "0004"
"""Newest revision in `migrations/versions`; a store at this version is opened without loading Alembic (0.3 s)."""


def default_url() -> str:
    """``$SHOAL_STATE_URL``, by default a SQLite file in ``$SHOAL_HOME``."""
    return os.environ.get("SHOAL_STATE_URL") or f"sqlite:///{home() / 'state.db'}"


class Store:
    """The rows of pools and jobs, in SQLite or PostgreSQL.

    Args:
        url: SQLAlchemy URL; :func:`default_url` by default.
        migrate: Bring the schema up to date (and make the database where there is none). A process that only proves its
            right to exist says False: it must not make a database anew where somebody removed it.

    Raises:
        StoreError: The database cannot be used; the message says why and what to do.
    """

    def __init__(self, url: str | None = None, *, migrate: bool = True) -> None:
        self.url = url or default_url()
        self._engine = engines.engine(self.url)
        self._file = engines.sqlite_file(self.url)
        if migrate:
            self._migrate()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One write transaction: committed at the end of the block, rolled back when it raises. Signals wait for it.

        There is one at a time, in all processes on all hosts: what it reads stays true until its end. So keep it short,
        and wait for nothing in it.

        Raises:
            StoreError: The database refused.
        """
        try:
            with uninterrupted(), Session(self._engine, expire_on_commit=False) as session, session.begin():
                yield session
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent look, which waits for no writer and holds none up.

        Raises:
            StoreError: The database refused.
        """
        try:
            with Session(engines.reading(self._engine), expire_on_commit=False) as session:
                yield session
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error

    def exists(self) -> bool:
        """False where the database file was removed."""
        return self._file is None or self._file.exists()

    def _migrate(self) -> None:
        try:
            with engines.reading(self._engine).connect() as connection:
                if _version(connection) == SCHEMA_VERSION:
                    return
            # Who comes second waits for the first as every writer does, on whatever host it is. The file lock is for
            # SQLite alone, which refuses at once, whatever the timeout, while another turns a new file to WAL.
            with (
                file_lock(home() / "migrate.lock") if self._file else nullcontext(),
                self._engine.begin() as connection,
            ):
                version = _version(connection)
                if version == SCHEMA_VERSION:
                    return
                if version is not None and version > SCHEMA_VERSION:
                    raise too_new(self.url, version, SCHEMA_VERSION)
                from shoal.state.migrate import upgrade

                upgrade(connection)
        except SQLAlchemyError as error:
            raise explain(error, self.url) from error


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
