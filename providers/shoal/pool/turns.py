"""Select one of the processes that wait for a pool on this host to reconcile it, so that many cost no more than one."""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import uuid4

from shoal.pool.tunables import TURN_PATIENCE
from shoal.state.home import lock_file


class Turn:
    """One waiting process's turn to reconcile a pool.

    The turn is a file: its content names the process that has the turn, its modification time says since when. Turns
    only save work. If two processes take the turn at the same instant, both reconcile, which is safe.

    Args:
        pool: Name of the pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = lock_file(f"waiting-{pool}")
        self._me = uuid4().hex

    def take(self) -> bool:
        """Take or keep the turn. Return False while another active process has it."""
        if not self._is_mine() and 0 <= self._age() < TURN_PATIENCE:  # a negative age means the clock was set back
            return False
        with suppress(OSError):  # on a full disk the file is not written, and other processes reconcile too
            self._path.write_text(self._me)
        return True

    def give_up(self) -> None:
        """Give up the turn, so that another process can take it at once."""
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
