"""Which of all who wait for a pool on this host reconciles it: one does, so that many cost no more than one."""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import uuid4

from shoal.pool.tunables import TURN_PATIENCE
from shoal.state.home import lock_file


class Turn:
    """One waiter's turn at reconciling a pool, kept in a file that names who has it and whose time says since when.

    It only saves work: two that take it in the same instant reconcile side by side, which is safe.

    Args:
        pool: Name of the pool.
    """

    def __init__(self, pool: str) -> None:
        self._path = lock_file(f"waiting-{pool}")
        self._me = uuid4().hex

    def take(self) -> bool:
        """Take the turn or keep it; False while another has it and is at work."""
        if not self._is_mine() and 0 <= self._age() < TURN_PATIENCE:  # below 0: the clock was set back
            return False
        with suppress(OSError):  # a full disk only means that others reconcile too
            self._path.write_text(self._me)
        return True

    def give_up(self) -> None:
        """Let the next one have it at once."""
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
