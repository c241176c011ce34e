"""Tell whether the rows of the store may have changed, so that a process that watches them reads them only then.

SQLite changes its files with each transaction. A PostgreSQL server sends a notification for each write transaction to
the connections that listen; a connection to it is tested with a notification of its own, because a connection pooler
such as PgBouncer may keep all of them. If nothing is known, the rows count as changed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from shoal.state.databases import CHANGED, sqlite_file
from shoal.state.store import Store

log = logging.getLogger("shoal.state")

UNCHANGED_PERIOD = 30.0
"""Longest time in seconds for which rows count as unchanged, so that a lost notification delays a reaction, but does
not prevent it."""

_TICK_NS = 50_000_000
"""Age of a file's time below which the file may change once more without another time: the kernel's clock for files
advances in steps of at most 10 ms."""

_PROOF_S = 2.0
"""Time within which a connection has to receive its own notification."""

_LISTEN_AGAIN_S = 60.0
"""Time after which shoal tries again to listen."""


class StoreChanges:
    """Watcher of all rows of a store.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._file = sqlite_file(store.url)
        self._listener: Connection | None = None
        self._listen_at = 0.0
        self._count = 0

    def sign(self) -> object:
        """Return a value that is equal to an earlier one only if no row has changed between the two calls."""
        found = self._of_server() if self._file is None else self._of_files(self._file)
        return object() if found is None else found

    def _of_files(self, file: Path) -> object | None:
        log_file = Path(f"{file}-wal")
        found = file_sign(file), file_sign(log_file) if log_file.exists() else ()
        return None if None in found else found

    def _of_server(self) -> object | None:
        if self._listener is None and time.monotonic() >= self._listen_at:
            self._listen()
        if self._listener is None:
            return None
        try:
            self._count += self._received(0.0)
        except Exception as error:  # of psycopg, which is not installed everywhere
            log.warning("the store's notifications have ended, so its rows are read every second: %s", error)
            self._close()
            return None
        return self._count

    def _listen(self) -> None:
        self._listen_at = time.monotonic() + _LISTEN_AGAIN_S
        try:
            self._listener = self._store.listening()
            self._listener.exec_driver_sql(f"LISTEN {CHANGED}")
            self._listener.exec_driver_sql(f"NOTIFY {CHANGED}")
            self._count += self._received(_PROOF_S)
        except Exception as error:
            log.warning("the store sends no notifications, so its rows are read every second: %s", error)
            self._close()

    def _received(self, timeout_s: float) -> int:
        """Return the number of new notifications. With a time to wait, raise `TimeoutError` if there are none."""
        assert self._listener is not None
        driver: Any = self._listener.connection.dbapi_connection
        found = len(list(driver.notifies(timeout=timeout_s, stop_after=1 if timeout_s else None)))
        if timeout_s and not found:
            raise TimeoutError("its own notification did not arrive")
        return found

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.invalidate()
            listener.close()


def file_sign(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is written or replaced; None if it does not exist or has just been
    written, and may be written again at the same time by the kernel's clock."""
    try:
        found = path.stat()
    except OSError:
        return None
    if abs(time.time_ns() - found.st_mtime_ns) < _TICK_NS:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
