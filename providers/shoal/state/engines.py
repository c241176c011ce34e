"""How each database is opened, so that a transaction means the same in both: one writer at a time, consistent looks.

SQLite is opened the one way that lost no update in 12 processes x 20 read-modify-writes: autocommit mode, an explicit
`BEGIN IMMEDIATE`, WAL, and a busy timeout. SQLAlchemy's default lost 220 of 240 in silence.

PostgreSQL gets the same by a lock that every write transaction takes first and its end releases. So no two of them can
deadlock, none fails to serialise, and nobody has to remember which row to lock before which. Ours take milliseconds.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from shoal.errors import MissingExtraError, StoreError
from shoal.state import codec

LOCK_WAIT_S = 30
"""How long a write waits for others: far above any transaction of ours, far below an operation's deadline."""

_PAUSED_WRITER_S = 15
"""A writer that says nothing for so long (paused, or its host is gone) loses its transaction, before others give up
waiting for it. On SQLite, whose lock is its process's, nobody can take it away."""

_WRITERS_LOCK = int.from_bytes(b"shoal")
"""Key of the advisory lock: any number that others in the same database are unlikely to use."""

_BEGIN_WRITING = (
    f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{_PAUSED_WRITER_S}s'; "
    f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})"
)

_CONNECT = {
    "application_name": "shoal",
    "connect_timeout": "10",
    # A server that went without a word (a cut link, a lost host) is noticed after some 20 s instead of 15 minutes.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
"""What a URL may say otherwise (`?connect_timeout=3`)."""

_JSON: dict[str, Any] = {"json_serializer": codec.dumps, "json_deserializer": codec.loads}

_READ_ONLY = "shoal_reads"

_pooled: weakref.WeakSet[Engine] = weakref.WeakSet()


def parsed(url: str) -> URL:
    """Check a URL and name the driver that is used.

    Raises:
        StoreError: It is no URL, or of no database that the store can be kept in.
    """
    try:
        found = make_url(url)
        backend = found.get_backend_name() if found.drivername != "postgres" else "postgresql"
    except (ArgumentError, ValueError):  # their texts may show a password
        raise StoreError(
            "SHOAL_STATE_URL is no URL (is its port a number, is its password percent-encoded?): write "
            "postgresql+psycopg://USER@HOST:5432/DATABASE or sqlite:////FOLDER/state.db"
        ) from None
    if "@" in (found.host or ""):  # the rest of a password that the driver would show as the host it cannot find
        raise StoreError('SHOAL_STATE_URL has an "@" in its password: write it as %40')
    if backend == "postgresql":
        return found.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StoreError(f"SHOAL_STATE_URL names {backend}: the store is kept in PostgreSQL or SQLite")
    if not Path(found.database or "").is_absolute():
        raise StoreError(
            f"SHOAL_STATE_URL {url}: nodes run in other folders, so the path has to be absolute "
            "(sqlite:////FOLDER/state.db, four slashes)"
        )
    return found


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None for another."""
    found = parsed(url)
    return Path(found.database or "") if found.get_backend_name() == "sqlite" else None


@lru_cache(maxsize=8)
def engine(url: str) -> Engine:
    """The engine of a URL, for writing.

    Raises:
        StoreError: As of `parsed`, or the driver is not installed.
    """
    found = parsed(url)
    return _sqlite(found) if found.get_backend_name() == "sqlite" else _postgresql(found)


def reading(writing: Engine) -> Engine:
    """The same engine for looks: each sees the database at one instant, waits for no writer and writes nothing."""
    options: dict[str, Any] = {_READ_ONLY: True}
    if writing.dialect.name == "postgresql":
        options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    return writing.execution_options(**options)


def _sqlite(url: URL) -> Engine:
    # NullPool: a connection kept open would go on reading a database file that was removed or replaced.
    made = create_engine(url, poolclass=NullPool, connect_args={"timeout": float(LOCK_WAIT_S)}, **_JSON)

    @event.listens_for(made, "connect")
    def _connected(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(made, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if _reads(connection) else "BEGIN IMMEDIATE")

    return made


def _postgresql(url: URL) -> Engine:
    said = {name: value for name, value in _CONNECT.items() if name not in url.query}
    try:
        made = create_engine(
            url,
            # Said, because a server may have another default: a snapshot older than the lock would hide what the
            # writer before wrote.
            isolation_level="READ COMMITTED",
            # One connection is kept a process (a node's supervisor looks every second), and every look tries it first:
            # the server may have been started anew meanwhile. More, for threads, are closed after use.
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            # Nothing prepared: a pooler between may give each transaction another server.
            connect_args={**said, "prepare_threshold": None},
            **_JSON,
        )
    except ModuleNotFoundError as error:
        raise StoreError(str(MissingExtraError(error.name or "psycopg", "postgres"))) from None

    @event.listens_for(made, "begin")
    def _begin(connection: Connection) -> None:
        if not _reads(connection):
            # Without parameters, so that the three go in one message.
            connection.exec_driver_sql(_BEGIN_WRITING, execution_options={"no_parameters": True})

    _pooled.add(made)
    return made


def _reads(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_READ_ONLY))


def _forked() -> None:
    """A forked child drops the connections that it shares with its parent, without a word to the server."""
    for made in list(_pooled):
        made.dispose(close=False)


os.register_at_fork(after_in_child=_forked)
