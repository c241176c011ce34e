"""Show the progress of a Prefect task. `NodeLog` shows the number of a pool's nodes, `TrainingProgress` the progress of
a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from shoal.errors import ScaleError
from shoal.links import job_page
from shoal.prefect._run_holder import on_interrupt

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus
    from shoal.training.progress import Progress

PROGRESS_KEY = "shoal-progress"
PAGE_KEY = "shoal-job"

# `TrainingProgress` calls these functions in a thread. In an async task, Prefect would use their async versions;
# `_sync=True` makes Prefect use the sync versions. The type is Any because Prefect's type hints do not contain the
# argument `_sync`.
_create: Any = create_progress_artifact
_update: Any = update_progress_artifact
_link: Any = create_link_artifact


def show_page(job_id: str) -> None:
    """Create a Prefect link artifact to a job's page. Do nothing if ``SHOAL_UI_URL`` is not set."""
    address = job_page(job_id)
    if address is None:
        return
    try:
        _link(address, link_text=f"Job {job_id}", key=PAGE_KEY, _sync=True)
    except Exception as error:  # The job is already running. A missing link must not make the task fail.
        get_run_logger().warning("the link to the job's page could not be stored: %s", error)


class NodeLog:
    """An `on_progress` callback that logs the number of active nodes, and can interrupt the call that waits for nodes.

    Args:
        holder: Name of the holder whose lease the run waits for. If this lease is in the pool's queue, the lease's
            place is logged, too. None if the run does not wait for a lease.
    """

    def __init__(self, holder: str | None = None) -> None:
        self._holder = holder
        self._logger = get_run_logger()
        self._last_logged = ""
        self._interrupted = False
        on_interrupt(self.interrupt)

    def interrupt(self) -> None:
        """Make the next call of this object raise ScaleError, so that the wait ends and the request for nodes is rolled
        back.

        This method may be called from any thread.
        """
        self._interrupted = True

    def __call__(self, status: PoolStatus) -> None:
        """Log the number of active nodes, and the lease's place in the queue, if either has changed."""
        if self._interrupted:
            raise ScaleError(f'the wait for nodes of pool "{status.name}" was cancelled')
        line = f"{status.name}: {status.progress(self._holder)}"
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
        """Create or update the progress artifact. After an error, log a warning and stop updating the artifact."""
        if progress.total is None or self._failed:
            return
        percent, text = 100.0 * progress.done / progress.total, str(progress)
        try:
            if self._artifact is None:
                self._artifact = _create(percent, PROGRESS_KEY, text, _sync=True)
            else:
                _update(self._artifact, percent, text, _sync=True)
        except Exception as error:  # A problem with the progress display must not make the training fail.
            self._failed = True
            self._logger.warning("the Prefect artifact with the progress could not be written: %s", error)
