"""Convert database errors to a `StoreError` that tells the user what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from shoal.errors import ShoalError, StoreError, StoreUnreachableError
from shoal.redaction import redact_value

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
    for kind, advice in _candidates(cause, text):
        return kind(f"the state store {shown_url(url)} cannot be used ({text}): {advice}")
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    kind = StoreUnreachableError if lost else StoreError
    return kind(f"the state store {shown_url(url)} cannot be used ({text}): check that it can be reached")


def _candidates(cause: BaseException, text: str) -> Iterator[tuple[type[StoreError], str]]:
    if (code := getattr(cause, "sqlstate", None)) in _SQLSTATES:
        yield StoreError, _SQLSTATES[code]
    yield from ((StoreError, advice) for sign, advice in _WRONG.items() if sign in text)
    yield from ((StoreUnreachableError, advice) for sign, advice in _AWAY.items() if sign in text)
