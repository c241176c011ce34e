"""If several processes on this host wait for a pool, let only one of them at a time reconcile the pool.

Each waiting process is able to reconcile the pool. Only one of them does so at a time, so that many waiting processes
need no more CPU time than one.
"""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import uuid4

from shoal.pool.timeouts import TURN_PATIENCE
from shoal.state.home import lock_file


class Turn:
    """The turn to reconcile a pool: while one process has the turn, the other waiting processes do not reconcile.

    The turn is a file. Its content names the process that has the turn, and its modification time is the time at which
    this process last took it. Turns only save work. If two processes take the turn at the same instant, both reconcile
    the pool, which is safe.

    Args:
        pool: Name of the pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = lock_file(f"waiting-{pool}")
        self._me = uuid4().hex

    def take(self) -> bool:
        """Take or keep the turn to reconcile the pool. Return False if another process took the turn less than
        TURN_PATIENCE seconds ago."""
        # The file contains the id of the process that has the turn. If the file's age is negative, the clock was set
        # back. This process then takes the turn.
        if not self._is_mine() and 0 <= self._age() < TURN_PATIENCE:
            return False
        # If the disk is full, the file cannot be written, and each waiting process reconciles the pool. This is safe.
        with suppress(OSError):
            self._path.write_text(self._me)
        return True

    def give_up(self) -> None:
        """Give up the turn by removing the file that records this process's turn. Another process can then take the
        turn at once."""
        if self._is_mine():
            self._path.unlink(missing_ok=True)

    def _age(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except OSError:
            return TURN_PATIENCE

    def _is_mine(self) -> bool:
        try:
            return self._path.read_text() == self._me
        except OSError:
            return False
