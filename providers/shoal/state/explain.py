"""What is wrong with a store, and what to do about it: from a database's error to ours."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from shoal.errors import StoreError, StoreUnreachableError
from shoal.redaction import redact_value

_AWAY = {
    "database is locked": "another process has been writing for very long: look for one that is paused, and end it",
    "lock timeout": "another process has been writing for very long: look for it in pg_stat_activity, and end it",
    "too many": "the server has no connection left, and each node and each process keeps one: raise max_connections",
    "slots are reserved": "the server has no connection left for this user: raise max_connections",
    "Connection refused": "no server listens there: start it, or check host and port in SHOAL_STATE_URL",
    "No such file or directory": "no server listens there: start it, or check the socket's folder in SHOAL_STATE_URL",
    "resolve host": "check the host in SHOAL_STATE_URL",
    "translate host name": "check the host in SHOAL_STATE_URL",
    "timeout expired": "the server does not answer: check host and port in SHOAL_STATE_URL, and the network between",
    "starting up": "the server is starting: try again in a moment",
    "shutting down": "the server is being stopped: try again when it is back",
    "recovery mode": "the server is recovering: try again in a moment",
    "terminating connection": "the server ended the connection: try again when it is back",
    "server closed the connection": "the server went away: try again when it is back",
    "connection is closed": "the server went away: try again when it is back",
}
"""A sign in the database's message that it cannot be used now, and may be later -> what to do; the first that fits."""

_WRONG = {
    # SQLite
    "database disk image is malformed": "the file is corrupt: restore a backup, or move it away to start anew",
    "file is not a database": "the file is no SQLite database: move it away, or set SHOAL_HOME",
    "attempt to write a readonly database": "the file is read-only: make it writable, or set SHOAL_HOME",
    "database or disk is full": "the disk is full: free some room and run `shoal sweep`",
    "unable to open database file": "it cannot be opened: check the folder and its permissions, or set SHOAL_HOME",
    "disk I/O error": "the disk refuses: look for a full or failing one, free some room and run `shoal sweep`",
    "no such table": "it is not shoal's, or was not finished: `shoal pool list` sets it up",
    # PostgreSQL
    "read-write mode during recovery": "the server is a standby: name the primary in SHOAL_STATE_URL",
    "password authentication failed": "check user and password in SHOAL_STATE_URL or ~/.pgpass",
    "no password supplied": "put the password into ~/.pgpass, or into SHOAL_STATE_URL",
    "pg_hba.conf": "the server lets this user in from elsewhere only: ask who runs it for a line in its pg_hba.conf",
    'role "': "check the user in SHOAL_STATE_URL, or have the server's owner create it",
    "does not exist": "make the database (`createdb NAME`), or check its name in SHOAL_STATE_URL",
}
"""The same for what lasts until somebody does something about it."""

_SQLSTATES = {
    "25P03": "this process was paused in the middle of writing, and nothing was written: try again",
    "42501": "the user lacks rights: GRANT CREATE, USAGE ON SCHEMA public TO it, or let it own the database",
    "42P01": "the tables are missing: `shoal pool list` makes them",
    "53100": "the server's disk is full: free some room there and run `shoal sweep`",
}
"""PostgreSQL's code -> what to do."""


def shown(url: str) -> str:
    """A URL as it may be read by anyone."""
    return redact_value(make_url(url).render_as_string(hide_password=False))


def explain(error: SQLAlchemyError, url: str) -> StoreError:
    """The error that a user sees: which store, what is wrong, what to do."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(cause).split())
    for kind, advice in _candidates(cause, text):
        return kind(f"the state store {shown(url)} cannot be used ({text}): {advice}")
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    kind = StoreUnreachableError if lost else StoreError
    return kind(f"the state store {shown(url)} cannot be used ({text}): check that it can be reached")


def _candidates(cause: BaseException, text: str) -> Iterator[tuple[type[StoreError], str]]:
    if (code := getattr(cause, "sqlstate", None)) in _SQLSTATES:
        yield StoreError, _SQLSTATES[code]
    yield from ((StoreError, advice) for sign, advice in _WRONG.items() if sign in text)
    yield from ((StoreUnreachableError, advice) for sign, advice in _AWAY.items() if sign in text)


def too_new(url: str, version: str, known: str) -> StoreError:
    """A newer shoal wrote it."""
    return StoreError(
        f"{shown(url)} was written by a newer shoal (schema {version}, this one knows {known}): upgrade shoal, or set "
        "SHOAL_HOME (SHOAL_STATE_URL) to another"
    )
