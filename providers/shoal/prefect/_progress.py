"""`NodeLog`: log the number of nodes while a task waits for nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.logging import get_run_logger

from shoal.errors import ScaleError

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus


class NodeLog:
    """An `on_progress` callback that logs each change to the run's log, and can interrupt the call that waits.

    Args:
        holder: Holder whose lease the run waits for; its place in the queue is logged, too.
    """

    def __init__(self, holder: str | None = None) -> None:
        self._holder = holder
        self._logger = get_run_logger()
        self._last_logged = ""
        self._interrupted = False

    def interrupt(self) -> None:
        """Request that the waiting call ends and rolls back when it next calls this object."""
        self._interrupted = True

    def __call__(self, status: PoolStatus) -> None:
        """Log how many nodes are active, if this has changed.

        Raises:
            ScaleError: `interrupt` was called.
        """
        if self._interrupted:
            raise ScaleError(f'waiting for pool "{status.name}" was cancelled')
        line = f"{status.name}: {len(status.active)} of {status.target} nodes active"
        if note := status.queue_note(self._holder):
            line += f"; the lease is {note}"
        if line != self._last_logged:
            self._logger.info(line)
            self._last_logged = line
