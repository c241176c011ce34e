"""`NodeLog` and `TrainingProgress`: show how far a pool or a training is while a task waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from shoal.errors import ScaleError

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus
    from shoal.training.progress import Progress

PROGRESS_KEY = "shoal-progress"

# These functions are called in a thread. If the task is async, Prefect would call the async version of the function,
# and `_sync=True` selects the sync one. The type is Any because Prefect's type hints do not contain the argument
# `_sync`.
_create: Any = create_progress_artifact
_update: Any = update_progress_artifact


class NodeLog:
    """An `on_progress` callback that logs the number of active nodes, and can interrupt the call that waits for them.

    Args:
        holder: Name of the holder whose lease the run waits for. If this lease is in the pool's queue, its place is
            logged, too. None if the run waits for no lease.
    """

    def __init__(self, holder: str | None = None) -> None:
        self._holder = holder
        self._logger = get_run_logger()
        self._last_logged = ""
        self._interrupted = False

    def interrupt(self) -> None:
        """Set a flag, so that the next call of this object raises an error. The waiting call then rolls back and ends.

        This method may be called from any thread.
        """
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


class TrainingProgress:
    """An `on_progress` callback that shows a job's progress in Prefect's UI, as a progress artifact of the task run.

    A training whose number of steps is not known, such as a user's own function, gets no artifact.
    """

    def __init__(self) -> None:
        self._logger = get_run_logger()
        self._artifact: UUID | None = None
        self._failed = False

    def __call__(self, progress: Progress) -> None:
        """Create or update the artifact. After an error, log a warning once, and do not try to update it again."""
        if progress.total is None or self._failed:
            return
        percent, text = 100.0 * progress.done / progress.total, str(progress)
        try:
            if self._artifact is None:
                self._artifact = _create(percent, PROGRESS_KEY, text, _sync=True)
            else:
                _update(self._artifact, percent, text, _sync=True)
        except Exception as error:  # A training must not fail because the UI cannot show its progress.
            self._failed = True
            self._logger.warning("the Prefect artifact with the progress could not be written: %s", error)
