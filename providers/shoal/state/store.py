"""Open the state store (the database with the rows of pools and jobs), and run transactions in this database.

A step is a named transaction, or a named action on files or processes. A process may be killed before, during or after
each step, and the next process has to continue from there. The crash tests check that it can: they replace the function
`passing` by one that kills the process at a chosen point of a step. The names of the steps of pools are in
`shoal.pool.journal.rows`, those of the steps of jobs in `shoal.jobs.journal.steps`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from sqlalchemy import Connection, Engine, Row, inspect, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.sql.selectable import TypedReturnsRows

from shoal.errors import StoreError
from shoal.state import databases, schema
from shoal.state.databases import explain, shown_url
from shoal.state.home import default_url
from shoal.state.private_folders import keep_file_private, make_file

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class _ThreadSession(Session):
    """Session that no other thread can close.

    Airflow's exit handler closes the sessions of all libraries and all threads (`close_all_sessions`). A session that
    another thread uses would fail, or crash the process inside the driver of the database.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, expire_on_commit=False)
        self._thread = threading.get_ident()

    def close(self) -> None:
        if threading.get_ident() == self._thread:
            super().close()


class Store:
    """The database with the rows of pools and jobs, in SQLite or PostgreSQL.

    Args:
        url: SQLAlchemy URL. Default: `shoal.state.home.default_url`.
        migrate: Create the database if needed, and upgrade its tables to this version of shoal. Background processes
            (supervisor, reconciler) pass False. Otherwise they would create the database again after a user removed it.

    Raises:
        StoreError: The database cannot be used. The message says why and what to do.
    """

    def __init__(self, url: str | None = None, *, migrate: bool = True) -> None:
        self.url = url or default_url()
        self._engine = databases.engine(self.url)
        self._file = databases.sqlite_file(self.url)
        if self._file is not None:
            keep_file_private(self._file)
        if migrate:
            if self._file is not None:
                make_file(self._file)
                databases.fill_reserve(self._file)
            self._migrate()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a write transaction. Commit the transaction at the end of the ``with`` block, or roll it back if the
        block raises an exception.

        Only one write transaction is open at a time, in all processes on all hosts. So the rows that the block reads do
        not change until the end of the block. Keep the block short, and do not wait for anything in the block, because
        all other writers wait for its end. Signals that arrive during the block are handled after it.

        Raises:
            StoreError: The database reported an error.
        """
        with self._explained(), uninterrupted(), _ThreadSession(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def reading(self, *, snapshot: bool = True) -> Iterator[Session]:
        """Open a read transaction, which sees the database at one instant.

        Readers and writers do not wait for each other.

        Args:
            snapshot: Whether several SELECTs have to see the database at the same instant. Pass False for a single
                SELECT, which is faster without a transaction.

        Raises:
            StoreError: The database reported an error.
        """
        with self._explained(), _ThreadSession(databases.reading(self._engine, snapshot=snapshot)) as session:
            yield session

    def get(self, table: type[_T], key: Any) -> _T | None:
        """Read one row by its primary key; None if there is no such row."""
        with self.reading(snapshot=False) as session:
            return session.get(table, key)

    def scalar(self, query: TypedReturnsRows[_T]) -> _T | None:
        """Read the first value, or row of one table, that a single SELECT finds; None if it finds nothing."""
        with self.reading(snapshot=False) as session:
            return session.scalar(query)

    def scalars(self, query: TypedReturnsRows[_T]) -> Sequence[_T]:
        """Read the values, or rows of one table, that a single SELECT finds."""
        with self.reading(snapshot=False) as session:
            return session.scalars(query).all()

    def rows(self, query: TypedReturnsRows[*_Ts]) -> Sequence[Row[*_Ts]]:
        """Read the rows with the columns that a single SELECT names."""
        with self.reading(snapshot=False) as session:
            return session.execute(query).all()

    def listening(self) -> Connection:
        """Open a connection of its own, without transactions, for notifications of PostgreSQL."""
        connection = databases.reading(self._engine, snapshot=False).connect()
        connection.detach()
        return connection

    def exists(self) -> bool:
        """Return whether the SQLite file still exists. For PostgreSQL, the result is always True."""
        return self._file is None or self._file.exists()

    def has_tables(self) -> bool:
        """Return whether shoal has ever been used with this database, which then has its tables.

        Raises:
            StoreError: The database reported an error.
        """
        with self._explained(), databases.reading(self._engine).connect() as connection:
            return _version(connection) is not None

    def _migrate(self) -> None:
        with self._explained():
            with databases.reading(self._engine).connect() as connection:
                if _version(connection) == databases.SCHEMA_VERSION:
                    return
            # The upgrade is a write transaction. So if two processes upgrade the tables at the same time, the second
            # process waits for the first.
            with self._engine.begin() as connection:
                version = _version(connection)
                if version == databases.SCHEMA_VERSION:
                    return
                if version is not None and version > databases.SCHEMA_VERSION:
                    raise StoreError(
                        f"{shown_url(self.url)} was written by a newer shoal (its schema is {version}, this version "
                        f"supports {databases.SCHEMA_VERSION}): upgrade shoal, or set SHOAL_HOME or SHOAL_STATE_URL to "
                        "another store"
                    )
                if version is not None and version < databases.FIRST_VERSION:
                    raise StoreError(
                        f"{shown_url(self.url)} was written by a version before 0.1.0, which was never released: set "
                        "SHOAL_HOME or SHOAL_STATE_URL to another store"
                    )
                if version is None:
                    schema.create_tables(connection)
                else:
                    databases.upgrade(connection)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the errors of the database as errors of the user, but a signal's exception as it is.

        If a signal handler raises an exception inside of SQLAlchemy, SQLAlchemy's handling of it can raise an error of
        its own.
        """
        outer = sys.exc_info()[1]
        try:
            yield
        except (SQLAlchemyError, AssertionError) as error:
            cause = error.__context__
            while cause is not None and cause is not outer:
                if not isinstance(cause, Exception):
                    raise cause from None
                cause = cause.__context__
            if isinstance(error, AssertionError):
                raise
            raise explain(error, self.url) from error


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


_RAISING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers may raise an exception: SIGINT (Ctrl-C), SIGTERM (a request to end), and SIGALRM, which
workflow engines use for the timeout of a task."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals during a short ``with`` block. The handlers of these signals are called when the block has ended.

    Without this delay, a signal handler could raise an exception while a transaction is being opened. The transaction
    would then stay open as long as the exception's traceback exists. If the code that handles the exception needs the
    database, it would wait forever for a lock that its own process holds.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python runs signal handlers only in the main thread, so in other threads there is nothing to delay.
        yield
        return
    came: list[int] = []
    handlers: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    try:
        for number in _RAISING:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, note)
        yield
    finally:
        for restored, handler in handlers.items():
            signal.signal(restored, handler)
        for waiting in came:
            handlers[waiting](waiting, None)


class At(StrEnum):
    """Points of a step (a named transaction or action) at which the crash tests may kill the process."""

    BEFORE = "before"
    WRITTEN = "written"
    """The transaction has written everything, but has not committed yet. Actions do not have this point."""
    AFTER = "after"


def passing(step: StrEnum, at: At) -> None:
    """Do nothing. Every process calls this function at each point of each step, and crash tests replace it by one that
    kills the calling process."""


@contextmanager
def transaction(store: Store, step: StrEnum) -> Iterator[Session]:
    """Run a ``with`` block in a write transaction. Crash tests can kill the calling process before, during or after the
    transaction.
    """
    passing(step, At.BEFORE)
    with store.transaction() as session:
        yield session
        passing(step, At.WRITTEN)
    passing(step, At.AFTER)


@contextmanager
def act(step: StrEnum) -> Iterator[None]:
    """Run a ``with`` block that acts on files or processes. Crash tests can kill the calling process before or after
    the block.
    """
    passing(step, At.BEFORE)
    yield
    passing(step, At.AFTER)
