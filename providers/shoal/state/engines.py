"""Open the databases so that transactions behave the same in both: one writer at a time, and consistent reads.

SQLite is opened with autocommit mode, an explicit `BEGIN IMMEDIATE`, WAL, and a busy timeout. In a test of 12 processes
with 20 read-modify-writes each, only these settings lost no update. SQLAlchemy's defaults silently lost 220 of 240.

On PostgreSQL, every write transaction first takes an advisory lock, and releases it at its end. So write transactions
cannot deadlock or fail to serialize, and the order in which they lock rows does not matter. shoal's transactions take
only milliseconds.
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
"""Seconds that a write transaction waits for others. Much longer than any transaction of shoal, much shorter than the
deadline of an operation."""

_PAUSED_WRITER_S = 15
"""Seconds without a statement after which PostgreSQL ends a write transaction, whose process is paused or whose host is
gone. Shorter than LOCK_WAIT_S, so that waiting transactions go on instead of failing. SQLite cannot end such a
transaction, because its lock belongs to the process."""

_WRITERS_LOCK = int.from_bytes(b"shoal")
"""Key of the advisory lock: a number that other programs in the same database are unlikely to use."""

_BEGIN_WRITING = (
    f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{_PAUSED_WRITER_S}s'; "
    f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})"
)

_CONNECT = {
    "application_name": "shoal",
    "connect_timeout": "10",
    # A connection to a lost host or over a cut link fails after about 20 s instead of 15 minutes.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
"""Connection parameters, unless the URL sets them (`?connect_timeout=3`)."""

_JSON: dict[str, Any] = {"json_serializer": codec.dumps, "json_deserializer": codec.loads}

_READ_ONLY = "shoal_reads"

_pooled: weakref.WeakSet[Engine] = weakref.WeakSet()


def parsed(url: str) -> URL:
    """Parse and check a store URL, and set the driver for PostgreSQL.

    Raises:
        StoreError: The text is not a URL, or names a database that shoal does not support.
    """
    try:
        found = make_url(url)
        backend = found.get_backend_name() if found.drivername != "postgres" else "postgresql"
    except (ArgumentError, ValueError):  # their messages may contain a password
        raise StoreError(
            "SHOAL_STATE_URL is not a valid URL (is the port a number, and the password percent-encoded?): write "
            "postgresql+psycopg://USER@HOST:5432/DATABASE or sqlite:////FOLDER/state.db"
        ) from None
    if "@" in (found.host or ""):  # part of the password, which the driver's error would show as an unknown host
        raise StoreError('SHOAL_STATE_URL has an "@" in its password: write it as %40')
    if backend == "postgresql":
        return found.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StoreError(f"SHOAL_STATE_URL names {backend}, which is not supported: use PostgreSQL or SQLite")
    if not Path(found.database or "").is_absolute():
        raise StoreError(
            f"SHOAL_STATE_URL {url}: the path has to be absolute, because nodes run in other folders "
            "(write sqlite:////FOLDER/state.db, with four slashes)"
        )
    return found


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite URL, or None for another database."""
    found = parsed(url)
    return Path(found.database or "") if found.get_backend_name() == "sqlite" else None


@lru_cache(maxsize=8)
def engine(url: str) -> Engine:
    """Return the engine for write transactions on a URL.

    Raises:
        StoreError: The URL is invalid (see `parsed`), or the driver is not installed.
    """
    found = parsed(url)
    return _sqlite(found) if found.get_backend_name() == "sqlite" else _postgresql(found)


def reading(writing: Engine, *, snapshot: bool = True) -> Engine:
    """Return the same engine for read transactions.

    A read transaction sees the database at one instant, does not wait for writers, and cannot write.

    Args:
        writing: The engine for write transactions.
        snapshot: False for a single SELECT, which sees one instant without a transaction: on PostgreSQL this saves two
            of four round trips.
    """
    options: dict[str, Any] = {_READ_ONLY: True}
    if writing.dialect.name == "postgresql":
        options |= {"isolation_level": "REPEATABLE READ" if snapshot else "AUTOCOMMIT", "postgresql_readonly": True}
    return writing.execution_options(**options)


def _sqlite(url: URL) -> Engine:
    # NullPool, because an open connection would keep reading a database file that was removed or replaced.
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
    parameters = {name: value for name, value in _CONNECT.items() if name not in url.query}
    try:
        made = create_engine(
            url,
            # Explicit, because a server may have another default. With REPEATABLE READ, a snapshot taken before the
            # advisory lock would hide the previous writer's changes.
            isolation_level="READ COMMITTED",
            # Each process keeps one connection, because a node's supervisor reads every second. Further connections,
            # for threads, are closed after use. The pre-ping detects that the server was restarted.
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            # No prepared statements, because a connection pooler may send each transaction to another server session.
            connect_args={**parameters, "prepare_threshold": None},
            **_JSON,
        )
    except ModuleNotFoundError as error:
        raise StoreError(str(MissingExtraError(error.name or "psycopg", "postgres"))) from None

    @event.listens_for(made, "begin")
    def _begin(connection: Connection) -> None:
        if not _reads(connection):
            # Without parameters, the three statements are sent in one message.
            connection.exec_driver_sql(_BEGIN_WRITING, execution_options={"no_parameters": True})

    _pooled.add(made)
    return made


def _reads(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_READ_ONLY))


def _forked() -> None:
    """Drop the connections that a forked child shares with its parent, without closing them on the server."""
    for made in list(_pooled):
        made.dispose(close=False)


os.register_at_fork(after_in_child=_forked)
