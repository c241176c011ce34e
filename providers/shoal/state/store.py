"""Opening the store and its transactions.

SQLite is opened the one way that lost no update in 12 processes x 20 read-modify-writes: autocommit mode, an explicit
`BEGIN IMMEDIATE`, WAL, and a busy timeout. SQLAlchemy's default lost 220 of 240 in silence.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from shoal.errors import StoreError
from shoal.state.home import home
from shoal.state.locks import file_lock
from shoal.state.signals import uninterrupted

SCHEMA_VERSION = "0001"
"""Newest revision in `migrations/versions`; a store at this version is opened without loading Alembic (0.3 s)."""

_BUSY_TIMEOUT_S = 30.0
"""How long a write waits for another one: far above any transaction of ours, far below an operation's deadline."""


_READ_ONLY = {"shoal_reads": True}


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
        self._engine = _engine(self.url)
        if migrate:
            self._migrate()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One write transaction: committed at the end of the block, rolled back when it raises. Signals wait for it.

        Raises:
            StoreError: The database refused.
        """
        try:
            with uninterrupted(), Session(self._engine, expire_on_commit=False) as session, session.begin():
                yield session
        except SQLAlchemyError as error:
            raise _explain(error, self.url) from error

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent look, which waits for no writer and holds none up.

        Raises:
            StoreError: The database refused.
        """
        try:
            with Session(self._engine.execution_options(**_READ_ONLY), expire_on_commit=False) as session:
                yield session
        except SQLAlchemyError as error:
            raise _explain(error, self.url) from error

    def exists(self) -> bool:
        """False where the database file was removed."""
        path = _sqlite_path(self.url)
        return path is None or path.exists()

    def _migrate(self) -> None:
        try:
            if self._version() == SCHEMA_VERSION:
                return
            with file_lock(home() / "migrate.lock"):
                version = self._version()
                if version == SCHEMA_VERSION:
                    return
                if version is not None and version > SCHEMA_VERSION:
                    raise StoreError(
                        f"{_shown(self.url)} was written by a newer shoal (schema {version}, this one knows "
                        f"{SCHEMA_VERSION}): upgrade shoal, or point SHOAL_HOME elsewhere"
                    )
                from shoal.state.migrate import upgrade

                upgrade(self._engine)
        except SQLAlchemyError as error:
            raise _explain(error, self.url) from error

    def _version(self) -> str | None:
        with self._engine.execution_options(**_READ_ONLY).connect() as connection:
            if not self._engine.dialect.has_table(connection, "alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


@lru_cache(maxsize=8)
def _engine(url: str) -> Engine:
    if _sqlite_path(url) is None:
        return create_engine(url, pool_pre_ping=True)
    # NullPool: a connection kept open would go on reading a database file that was removed or replaced.
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": _BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        reads = connection.get_execution_options().get("shoal_reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _sqlite_path(url: str) -> Path | None:
    parsed = make_url(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def _shown(url: str) -> str:
    return make_url(url).render_as_string(hide_password=True)


def _explain(error: SQLAlchemyError, url: str) -> StoreError:
    cause = error.orig if isinstance(error, DBAPIError) else error
    hint = {
        "database disk image is malformed": "the file is corrupt: restore a backup, or move it away to start anew",
        "file is not a database": "the file is no SQLite database: move it away, or set SHOAL_HOME",
        "attempt to write a readonly database": "the file is read-only: make it writable, or set SHOAL_HOME",
        "database or disk is full": "the disk is full: free some room and run `shoal sweep`",
        "unable to open database file": "it cannot be opened: check the folder and its permissions, or set SHOAL_HOME",
    }
    advice = next((advice for sign, advice in hint.items() if sign in str(cause)), "check that it can be reached")
    return StoreError(f"the state store {_shown(url)} cannot be used ({cause}): {advice}")
