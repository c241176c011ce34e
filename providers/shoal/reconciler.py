"""The program of the background process that reconciles this host's pools and watches their jobs:
``python -m shoal.reconciler``. It joins `shoal.pool`, which does not know jobs, and `shoal.jobs`.
For jobs whose rows no longer change, it starts the program `shoal.jobs.reconcile.rounds`, which asks the pools' heads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable

from shoal.errors import StoreError
from shoal.jobs.journal.stages import Stage, is_waiting, stage_of
from shoal.jobs.timeouts import JOB_SILENT_AFTER, LOST_JOBS_PERIOD, SILENT_JOBS_PERIOD, WAITING_JOB_SILENT_AFTER
from shoal.os_processes import ProcessId, python_command
from shoal.own_pauses import waited_since
from shoal.pool import reconciling
from shoal.pool.backends.local.backend import inherited_environment
from shoal.pool.backends.local.processes import spawn_detached
from shoal.pool.journal import rows
from shoal.pool.reconciling import log_path
from shoal.state import Store
from shoal.state.schema import Job

log = logging.getLogger("shoal.reconciler")

_SETTLE_COMMAND = python_command("-m", "shoal.jobs.reconcile.rounds")
"""Command that records the end of lost jobs. A process of its own, as a head may take 30 s to answer."""


class LostJobs:
    """Periodic check for jobs that may be lost. If there are such jobs, the check starts a program that asks
    the pools' heads about them."""

    def __init__(self) -> None:
        self._silent = SilentJobs()
        self._look_at = self._settle_at = 0.0
        self._sign: object = None
        self._unfinished: list[Job] = []

    def look(self, store: Store, pools: list[str], sign: object) -> None:
        """Check the jobs of the given pools, at most every 10 s; ask heads about silent jobs, at most every 60 s."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + SILENT_JOBS_PERIOD
        try:
            if sign != self._sign:
                with store.reading() as session:
                    self._unfinished = list(rows.unfinished_jobs(session, pools))
                self._sign = sign
            silent = self._silent.among(self._unfinished)
            if silent and now >= self._settle_at:
                self._settle_at = now + LOST_JOBS_PERIOD
                log.info(
                    "the rows of jobs %s no longer change: asking the heads of their pools",
                    ", ".join(job.id for job in silent),
                )
                spawn_detached(_SETTLE_COMMAND, env=inherited_environment(), log=log_path())
        except StoreError as error:
            log.warning("%s", error)
        except Exception:
            log.exception("the check for lost jobs failed; it is repeated in %.0f s", SILENT_JOBS_PERIOD)


class SilentJobs:
    """Measure, with this process's monotonic clock, for how long the rows of unfinished jobs have not changed.

    Args:
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._unchanged_since: dict[tuple[object, ...], float] = {}

    def among(self, unfinished: Iterable[Job]) -> list[Job]:
        """Return the jobs that may be lost. A job may be lost if no process on this host is known to submit or run
        the job, and the job's row has not changed for 30 s (45 s for a job that waits in a queue).

        A job that was sent to the head but has not begun may be lost even if its submitter runs on this host. A job
        that waits in a queue may be lost even if a process polls it, because a process on another host cannot start it.
        """
        now = self._monotonic()
        doubtful = {_activity(job): job for job in unfinished if _is_doubtful(job)}
        self._unchanged_since = {sign: self._unchanged_since.get(sign, now) for sign in doubtful}
        silent = []
        for sign, job in doubtful.items():
            patience_s = WAITING_JOB_SILENT_AFTER if is_waiting(job) else JOB_SILENT_AFTER
            if waited_since(self._unchanged_since[sign], now) >= patience_s:
                silent.append(job)
        return silent


def _is_doubtful(job: Job) -> bool:
    """Return whether a job may be lost, because no process on this host is known to submit or run the job."""
    stage = stage_of(job)
    if stage is Stage.UNQUEUED:
        return not ProcessId.from_json(job.submitter).alive()
    if stage in (Stage.WAITING, Stage.SENT):
        # The submitter of a waiting job may be alive but no longer poll the job, or may run on another host. The driver
        # of a job that was sent may have died before it could record that the job runs.
        return True
    # If the driver runs on another host, its heartbeats change the job's row, so `among` does not return the job.
    return job.driver is not None and not ProcessId.from_json(job.driver).alive()


def _activity(job: Job) -> tuple[object, ...]:
    """Return the values of a job's row that change while a process works on the job. If the values do not change from
    one check to the next, no process has started the job or worked on it."""
    if is_waiting(job):
        return job.id, job.attempt, "waits", job.queued_at
    return job.id, job.attempt, job.state, job.heartbeat_at if job.driver else job.last_polled_at


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    os.chdir("/")
    reconciling.run(watch=LostJobs().look)
