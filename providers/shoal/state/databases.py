"""Open SQLite and PostgreSQL so that transactions behave the same in both: one writer at a time, and consistent reads.

SQLite is opened with autocommit mode, an explicit `BEGIN IMMEDIATE`, WAL (write-ahead log), and a busy timeout. In a
test, 12 processes each read, changed and wrote a value 20 times. With these settings, no update was lost. With
SQLAlchemy's defaults, 220 of the 240 updates were lost without an error.

On PostgreSQL, every write transaction first takes an advisory lock, and releases the lock at its end. So write
transactions run one after another: they cannot deadlock, they never fail with a serialization error, and the order in
which they lock rows does not matter.

A write transaction takes the lock of the writers as late as possible: when its first statement is ready. In a new
process, SQLAlchemy needs 6 ms of CPU to prepare a first statement, and SQLite some microseconds to run it. On a busy
machine, the kernel gives a process these 6 ms in parts. If the process held the lock meanwhile, all other writers would
wait.

Waiting for the lock is usually short, because shoal's transactions take only milliseconds. But when many processes
write at once, the last one waits for all others. SQLite has no queue: its writers try again and again, so one of them
may be unlucky for long. So a writer that has waited for long does not fail as long as other processes write. It fails
if one process keeps the lock for too long, probably because that process is paused. On SQLite, shoal checks this
(`_begin_writing_sqlite`). PostgreSQL has a queue, and ends a transaction that is paused (`_PAUSED_WRITER_S`).

Values are encoded so that both databases return the same. JSON has no NaN and no infinity, but Python's `json` writes
them nevertheless; PostgreSQL rejects such JSON, and SQLite accepts it. So NaN is written as ``{"$float": "nan"}`` (the
tag ``$float`` marks an encoded number), and infinity in the same way. PostgreSQL also rejects the character NUL in a
text, and both reject a lone surrogate (half of a UTF-16 pair, which Python allows in a str), so both are escaped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import re
import sqlite3
import time
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, CursorResult, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.pool import NullPool

from shoal.errors import MissingExtraError, ShoalError, StoreError, StoreUnreachableError
from shoal.secrets.redaction import redact_address, redact_value

_TAG = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LIKE_TAG = re.compile(r"\$+float")
"""Pattern of the keys that look like the tag ``$float``. If a user's document contains such a key, one more ``$`` is
written before the key, so that the user's ``{"$float": "nan"}`` is not read as NaN."""


def dump_json(document: Any) -> str:
    r"""Encode a document as strict JSON in ASCII. NUL and surrogates are written as escapes, such as ``\u0000``."""
    return json.dumps(_tagged(document), allow_nan=False)


def load_json(written: str | bytes) -> Any:
    """Decode a document that `dump_json` has written."""
    return json.loads(written, object_hook=_untagged)


def storable(text: str) -> str:
    r"""Escape the characters that databases reject: NUL as ``\x00``, and a lone surrogate as, for example,
    ``\udc80``."""
    return text.replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if key := _tag_key(value):
        return {f"${key}": _tagged(value[key])}
    return {key: _tagged(item) for key, item in value.items()}


def _untagged(value: dict[str, Any]) -> Any:
    key = _tag_key(value)
    if key is None:
        return value
    inner = value[key]
    if key != _TAG:
        return {key[1:]: inner}
    return _SPECIAL[inner] if isinstance(inner, str) and inner in _SPECIAL else value


def _tag_key(value: dict[Any, Any]) -> str | None:
    """Return the key of a dict that has a single key such as ``$float`` or ``$$float`` (see `_LIKE_TAG`). Return None
    for all other dicts."""
    if len(value) != 1:
        return None
    [key] = value
    return key if isinstance(key, str) and _LIKE_TAG.fullmatch(key) else None


LOCK_WAIT_S = 30
"""Seconds after which a write transaction on SQLite fails if it cannot get the lock and no other process changes the
database. All transactions of shoal are much shorter, and deadlines of operations are much longer."""

_TRY_S = 5
"""Seconds for which SQLite tries to get the lock before shoal checks whether the database has changed. SQLite tries 12
times in the first 0.2 s, and then 10 times per second. With only 0.25 s here, 200 waiting processes used a quarter of
the CPU time of two cores."""

_RESERVE, _RESERVE_BYTES = "-reserve", 256 * 2**10
"""Suffix of the name, and size, of the file that reserves disk space beside a SQLite file; see `fill_reserve`."""

_DISK_IS_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)

_QUEUE_WAIT_S = 120
"""Seconds after which a write transaction on PostgreSQL fails if it does not get the lock. Transactions wait for the
lock in a queue. If 200 processes write at once, each transaction may take 0.6 s."""

_PAUSED_WRITER_S = 15
"""Seconds without a statement after which PostgreSQL ends a write transaction. Without statements for so long, the
transaction's process is probably paused, or its host is gone. The limit is shorter than _QUEUE_WAIT_S, so that waiting
transactions get the lock before they fail. SQLite cannot end the transaction of a paused process, because the file lock
belongs to this process."""

_WRITERS_LOCK = int.from_bytes(b"shoal")
"""Key of the advisory lock: a number that other programs in the same database are unlikely to use."""

CHANGED = "shoal_changed"
"""Name of the channel to which each write transaction sends a notification, when it is committed."""

_BEGIN_WRITING = (
    f"SET LOCAL lock_timeout = '{_QUEUE_WAIT_S}s'; "
    f"SET LOCAL idle_in_transaction_session_timeout = '{_PAUSED_WRITER_S}s'; "
    f"NOTIFY {CHANGED}; SELECT pg_advisory_xact_lock({_WRITERS_LOCK})"
)

_CONNECT = {
    "application_name": "shoal",
    "connect_timeout": "10",
    # With these settings, a connection to a lost host, or over a broken network link, fails after about 20 s. By
    # default it would fail only after 15 minutes.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
"""Default connection parameters for PostgreSQL. A parameter in the store's URL (`?connect_timeout=3`) replaces the
default."""

_JSON: dict[str, Any] = {"json_serializer": dump_json, "json_deserializer": load_json}

_READ_ONLY = "shoal_reads"

_TO_BEGIN = "shoal_begins"
"""Key in the dict `info` of a connection. The value is the function that begins the transaction before its first
statement."""

_Begin = Callable[[Connection], object]

_pooled: weakref.WeakSet[Engine] = weakref.WeakSet()


def parsed(url: str) -> URL:
    """Parse and check the URL of the state store. In a PostgreSQL URL, set the driver psycopg."""
    try:
        found = make_url(url)
        backend = found.get_backend_name() if found.drivername != "postgres" else "postgresql"
    except (ArgumentError, ValueError):  # the messages of these errors may contain a password, so they are not shown
        raise StoreError(
            "SHOAL_STATE_URL is not a valid URL: write postgresql+psycopg://USER@HOST:5432/DATABASE or "
            "sqlite:////FOLDER/state.db, with a number as the port, and percent-encode special characters in a password"
        ) from None
    # If the password contains an "@", the URL parser treats the part of the password after the "@" as the host. The
    # driver's error message would then show this part. So such a URL is rejected.
    if "@" in (found.host or ""):
        raise StoreError('the password in SHOAL_STATE_URL contains an "@": write %40 for the "@"')
    if backend == "postgresql":
        return found.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise StoreError(f"SHOAL_STATE_URL names {backend}, which is not supported: use PostgreSQL or SQLite")
    if not Path(found.database or "").is_absolute():
        raise StoreError(
            f"SHOAL_STATE_URL {redact_address(url)}: the path has to be absolute, because nodes run in other folders "
            "(write sqlite:////FOLDER/state.db, with four slashes)"
        )
    return found


def sqlite_file(url: str) -> Path | None:
    """Return the path of the file that a SQLite URL names; None if the URL names another kind of database."""
    found = parsed(url)
    return Path(found.database or "") if found.get_backend_name() == "sqlite" else None


@lru_cache(maxsize=8)
def engine(url: str) -> Engine:
    """Return the SQLAlchemy engine for write transactions on the database with the given URL."""
    found = parsed(url)
    made = _sqlite(found) if found.get_backend_name() == "sqlite" else _postgresql(found)
    pool = type(made.pool)
    logging.getLogger(f"{pool.__module__}.{pool.__name__}").addFilter(_is_loggable)
    return made


def reading(writing: Engine, *, snapshot: bool = True) -> Engine:
    """Return a copy of a SQLAlchemy engine. The copy opens read transactions, and uses the same connections as the
    original engine.

    A read transaction sees the database at one instant, and does not wait for writers. On PostgreSQL it cannot write.
    """
    options: dict[str, Any] = {_READ_ONLY: True}
    if writing.dialect.name == "postgresql":
        options |= {"isolation_level": "REPEATABLE READ" if snapshot else "AUTOCOMMIT", "postgresql_readonly": True}
    return writing.execution_options(**options)


def _is_loggable(record: logging.LogRecord) -> bool:
    """Return False for a log record about an exception from a signal handler (such as Ctrl-C), else True.

    If such an exception arrives while SQLAlchemy closes a connection, SQLAlchemy logs the traceback as an error, and
    raises the exception again.
    """
    return record.exc_info is None or record.exc_info[1] is None or isinstance(record.exc_info[1], Exception)


def _sqlite(url: URL) -> Engine:
    # NullPool opens the database file again for each transaction. A connection that stays open would still read the old
    # file after the file was removed or replaced.
    made = create_engine(url, poolclass=NullPool, connect_args={"timeout": float(LOCK_WAIT_S)}, **_JSON)

    @event.listens_for(made, "connect")
    def _connected(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None
        _use_wal(connection, Path(url.database or ""))
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    _begin_late(made, writing=_begin_writing_sqlite, reading=lambda connection: _run(connection, "BEGIN"))
    return made


def fill_reserve(file: Path) -> None:
    """Reserve some disk space beside a SQLite file, so that the file can be read when the disk is full.

    Even to read, SQLite needs 32 KiB of disk space, for the file `-shm`. If there is no space for this file, a part of
    the reserve is freed, and the reserve is filled again when the store is opened the next time.
    """

    def private(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    # On a full disk, in a missing folder, or on macOS, there is no reserve.
    if not hasattr(os, "posix_fallocate"):
        return
    with contextlib.suppress(OSError), open(f"{file}{_RESERVE}", "ab", opener=private) as reserve:
        os.posix_fallocate(reserve.fileno(), 0, _RESERVE_BYTES)


def _give_back_reserve(file: Path) -> bool:
    """Free a part of the disk space that :func:`fill_reserve` has reserved, and return whether there was any.

    A part is kept, because a process that writes to the full disk may be faster to use the freed space.
    """
    try:
        size = os.stat(f"{file}{_RESERVE}").st_size
        os.truncate(f"{file}{_RESERVE}", max(0, size - _RESERVE_BYTES // 4))
    except OSError:
        return False
    return size > 0


def _use_wal(connection: sqlite3.Connection, file: Path) -> None:
    """Switch a SQLite file to WAL (write-ahead log), if the file was not switched before.

    While one connection switches a new file, all other connections fail at once, regardless of the busy timeout. So
    this function tries again.
    """
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", 0) in _DISK_IS_FULL and _give_back_reserve(file):
                continue
            if not _is_busy(error) or time.monotonic() > end:
                raise
        time.sleep(random.uniform(0.005, 0.02))  # a random time, so that two connections do not collide again


def _is_busy(error: BaseException | None) -> bool:
    """Return whether SQLite failed because another connection has locked the file."""
    # The lowest byte of SQLite's error code is the kind of error, and the higher bytes contain details. For example,
    # the lowest byte of SQLITE_BUSY_RECOVERY is SQLITE_BUSY.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def _begin_writing_sqlite(connection: Connection) -> None:
    """Begin a write transaction. Wait for the lock as long as other processes make progress (change the database)."""
    _run(connection, f"PRAGMA busy_timeout={_TRY_S * 1000:.0f}")
    version, tries_left = None, 0
    while True:
        try:
            _run(connection, "BEGIN IMMEDIATE")
            return
        except OperationalError as error:
            if not _is_busy(error.orig):
                raise
            # Count tries instead of measuring the time. If this process and the process with the lock were both paused,
            # a time limit could expire before the other process has released the lock.
            before, version = version, _run(connection, "PRAGMA data_version").scalar()
            tries_left = tries_left - 1 if version == before else LOCK_WAIT_S // _TRY_S
            if not tries_left:
                raise


def _postgresql(url: URL) -> Engine:
    parameters = {name: value for name, value in _CONNECT.items() if name not in url.query}
    try:
        made = create_engine(
            url,
            # The isolation level is set because the server may have another default. With REPEATABLE READ, a write
            # transaction would see the database as it was before the advisory lock was granted, without the previous
            # writer's changes.
            isolation_level="READ COMMITTED",
            # Each process keeps one connection open: a node's supervisor may read the database every second, and
            # should not connect again for each read. Further connections, which other threads need, are closed after
            # use. Before each use, `pool_pre_ping` tests the kept connection, and opens a new one if the server was
            # restarted.
            pool_size=1,
            max_overflow=-1,
            pool_pre_ping=True,
            # Prepared statements are turned off. They belong to one session of the server, and a connection pooler such
            # as PgBouncer may send each transaction to another session.
            # Texts are sent as UTF-8, whatever PGCLIENTENCODING or the settings of the user and database say.
            connect_args={**parameters, "client_encoding": "utf8", "prepare_threshold": None},
            **_JSON,
        )
    except ModuleNotFoundError as error:
        raise StoreError(str(MissingExtraError(error.name or "psycopg", "postgres"))) from None

    @event.listens_for(made, "connect", insert=True)
    def _connected(connection: Any, _record: Any) -> None:
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            connection.close()
            raise StoreError(
                f"the database in SHOAL_STATE_URL has the encoding {encoding}, which cannot store every text: create "
                "one with `createdb --encoding=UTF8 --template=template0 NAME`, and name it in SHOAL_STATE_URL"
            )

    _begin_late(made, writing=lambda connection: _run(connection, _BEGIN_WRITING))
    _pooled.add(made)
    return made


def _begin_late(made: Engine, *, writing: _Begin, reading: _Begin | None = None) -> None:
    """Configure an engine so that each transaction begins right before the transaction's first statement is sent."""

    @event.listens_for(made, "begin")
    def _begin(connection: Connection) -> None:
        connection.info[_TO_BEGIN] = reading if connection.get_execution_options().get(_READ_ONLY) else writing

    @event.listens_for(made, "before_cursor_execute")
    def _first_statement(connection: Connection, *_statement: Any) -> None:
        if (begin := connection.info.pop(_TO_BEGIN, None)) is None:
            return
        try:
            begin(connection)
        except Exception:
            # Let the next statement try again to begin the transaction, because no statement may run without a
            # transaction.
            connection.info[_TO_BEGIN] = begin
            raise


def _run(connection: Connection, statement: str) -> CursorResult[Any]:
    # With `no_parameters`, PostgreSQL's driver can send the three statements of `_BEGIN_WRITING` in a single message.
    return connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _forked() -> None:
    """Discard the database connections that a forked child process has inherited, so that the child opens its own
    connections.

    The inherited connections are not closed on the server, because the parent process still uses them.
    """
    for made in list(_pooled):
        made.dispose(close=False)


os.register_at_fork(after_in_child=_forked)


_AWAY = {
    "database is locked": "another process has been writing for too long: find the process, which may be paused, and "
    "end it",
    "lock timeout": "another process has been writing for too long: find it in pg_stat_activity, and end it",
    "too many": "the server has no connection left, and each node and each process keeps one: raise max_connections",
    "slots are reserved": "the server has no connection left for this user: raise max_connections",
    "Connection refused": "no server listens at this address: start it, or check host and port in SHOAL_STATE_URL",
    "No such file or directory": "no server listens at this socket: start it, or check the socket's folder in "
    "SHOAL_STATE_URL",
    "resolve host": "check the host in SHOAL_STATE_URL",
    "translate host name": "check the host in SHOAL_STATE_URL",
    "timeout expired": "the server does not answer: check host and port in SHOAL_STATE_URL, and the network between",
    "starting up": "the server is starting: try again in a moment",
    "shutting down": "the server is shutting down: try again when it runs again",
    "recovery mode": "the server is recovering: try again in a moment",
    "terminating connection": "the server ended the connection: try again when it runs again",
    "server closed the connection": "the server closed the connection: try again when it runs again",
    "connection is closed": "the server closed the connection: try again when it runs again",
}
"""Advice for errors that may be temporary. Each key is a part of the database's message, and each value is the advice
to the user. If several keys match, the first key counts."""

_WRONG = {
    # SQLite
    "database disk image is malformed": "the file is corrupt: restore a backup, or move it away to start with a new "
    "store",
    "file is not a database": "the file is not a SQLite database: move it away, or set SHOAL_HOME to another folder",
    "attempt to write a readonly database": "the file is read-only: make it writable, or set SHOAL_HOME to another "
    "folder",
    "database or disk is full": "the disk is full: free some disk space and run `shoal sweep`",
    "unable to open database file": "the file cannot be opened: check the folder and its permissions, or set "
    "SHOAL_HOME to another folder",
    "disk I/O error": "the disk reports an error: check whether it is full or failing, free some disk space and run "
    "`shoal sweep`",
    "no such table": "the file belongs to another program, or its setup was interrupted: run `shoal pool list` to "
    "create the tables",
    # PostgreSQL
    "read-write mode during recovery": "the server is a standby: use the primary in SHOAL_STATE_URL",
    "password authentication failed": "check user and password in SHOAL_STATE_URL or ~/.pgpass",
    "no password supplied": "put the password into ~/.pgpass, or into SHOAL_STATE_URL",
    "pg_hba.conf": "the server does not accept this user from this host: ask its administrator for an entry in "
    "pg_hba.conf",
    'role "': "check the user in SHOAL_STATE_URL, or ask the server's administrator to create it",
    "does not exist": "create the database (`createdb NAME`), or check its name in SHOAL_STATE_URL",
    "were matched": "the row was deleted meanwhile: look at the present state, and try again",
}
"""Advice for errors that last until the user fixes the cause. Each key is a part of the database's message, and each
value is the advice to the user. If several keys match, the first key counts."""

_SQLSTATES = {
    "25P03": "this process was paused during a write transaction, and nothing was written: try again",
    "42501": "the database user lacks rights: make it the owner of the database, or of the schema in its search_path, "
    "and of shoal's tables",
    "42P01": "the tables are missing: run `shoal pool list` to create them",
    "53100": "the server's disk is full: free some disk space there and run `shoal sweep`",
}
"""Advice by error code. Each key is a SQLSTATE (PostgreSQL's code for a kind of error), and each value is the advice to
the user. These codes are checked before the messages."""


def shown_url(url: str) -> str:
    """Return a database URL as text, without user and password."""
    return redact_value(make_url(url).render_as_string(hide_password=False))


def explain(error: SQLAlchemyError, url: str) -> ShoalError:
    """Convert a database error to the user's error, whose message names the store, the problem and the fix.

    An error of a column type (see `shoal.state.schema`) about a value is the user's error already.
    """
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    if isinstance(cause, ShoalError):
        return cause
    text = " ".join(str(cause).split())
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    kind, advice = StoreUnreachableError if lost else StoreError, "check that it can be reached"
    if (code := getattr(cause, "sqlstate", None)) in _SQLSTATES:
        kind, advice = StoreError, _SQLSTATES[code]
    elif signs := [sign for sign in _WRONG if sign in text]:
        kind, advice = StoreError, _WRONG[signs[0]]
    elif signs := [sign for sign in _AWAY if sign in text]:
        kind, advice = StoreUnreachableError, _AWAY[signs[0]]
    return kind(f"the state store {shown_url(url)} cannot be used ({text}): {advice}")


FIRST_VERSION = "0013"
"""Revision of shoal 0.1.0, the first in `migrations/versions`."""

SCHEMA_VERSION = "0013"
"""Newest revision in `migrations/versions`."""

SCRIPTS = Path(__file__).with_name("migrations")
"""Folder with the Alembic revisions."""


def upgrade(connection: Connection) -> None:
    """Upgrade the database to the newest schema.

    All changes are made in the caller's transaction. If one change fails, no change is made.
    """
    # Import Alembic only here, because the import takes 0.3 s, and a store with the newest schema needs no migration.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
