"""Show the progress of a Prefect task. `NodeLog` shows the number of a pool's nodes, `TrainingProgress` the progress of
a training, and `RunLog` its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import create_link_artifact, create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from shoal.errors import ScaleError
from shoal.links import job_page
from shoal.prefect._run_holder import on_interrupt

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus
    from shoal.training.reporting import Progress

PAGE_KEY = "shoal-job"

PROGRESS_PERIOD_S = 5.0
"""Shortest time between two writes of a progress artifact. Each is a request, of which Prefect Cloud allows 250 to
2,000 a minute for all runs together."""

LINES_PER_MINUTE = 100
"""Most lines of a job's log that are copied to Prefect in a minute. Prefect Cloud allows 500 to 10,000 for all runs
together, and refuses the lines of all runs that are over."""

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

    Args:
        clock: Function that returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = get_run_logger()
        self._clock = clock
        self._artifact: UUID | None = None
        self._next = clock()
        self._held_back: Progress | None = None
        self._has_failed = False

    def __call__(self, progress: Progress) -> None:
        """Create or update the progress artifact, unless it was written less than five seconds ago."""
        self._held_back = progress
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write the last progress that was held back. After an error, log a warning; the next call tries again."""
        progress, self._held_back = self._held_back, None
        if progress is None or progress.total is None:
            return
        self._next = self._clock() + PROGRESS_PERIOD_S
        percent, text = 100.0 * progress.done / progress.total, str(progress)
        try:
            if self._artifact is None:
                self._artifact = _create(percent, None, text, _sync=True)
            else:
                _update(self._artifact, percent, text, _sync=True)
        except Exception as error:  # A problem with the progress display must not make the training fail.
            if not self._has_failed:
                self._logger.warning("the Prefect artifact with the progress could not be written: %s", error)
            self._has_failed = True


class RunLog:
    """An `on_log` callback that copies a job's log to the log of the Prefect run, up to a number of lines a minute.

    Args:
        job_id: Id of the job.
        clock: Function that returns the present time in seconds.
    """

    def __init__(self, job_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = get_run_logger()
        self._clock = clock
        self._all_lines = job_page(job_id) or f"`shoal jobs logs {job_id}`"
        self._minute_ends = clock()
        self._lines = 0

    def __call__(self, line: str) -> None:
        """Log a line. Instead of the first line over the limit, log where all lines are."""
        now = self._clock()
        if now >= self._minute_ends:
            self._minute_ends, self._lines = now + 60.0, 0
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            self._logger.info(line)
        elif self._lines == LINES_PER_MINUTE + 1:
            self._logger.info(
                "the job logs more than %d lines a minute, so lines are left out here. All lines: %s",
                LINES_PER_MINUTE,
                self._all_lines,
            )
