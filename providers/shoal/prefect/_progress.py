"""What a task says while it waits for nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.logging import get_run_logger

from shoal.errors import ScaleError

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus


class NodeLog:
    """An `on_progress` of the core that logs each change to the run's log; interrupted, it ends the wait."""

    def __init__(self) -> None:
        self._logger = get_run_logger()
        self._said = ""
        self._interrupted = False

    def interrupt(self) -> None:
        """Have the call that reports here end, and roll back, at its next report."""
        self._interrupted = True

    def __call__(self, status: PoolStatus) -> None:
        """Say how many nodes there are.

        Raises:
            ScaleError: It was interrupted.
        """
        if self._interrupted:
            raise ScaleError(f'waiting for pool "{status.name}" was cancelled')
        said = f"{status.name}: {len(status.active)} of {status.target} nodes active"
        if said != self._said:
            self._logger.info(said)
            self._said = said
