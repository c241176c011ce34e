"""Write a driver's heartbeats, the progress of its training and its metrics into the store, and end the driver when its
job has to end.

A thread of the driver reads the job's row every 2 s. A heartbeat is the time of the driver's last sign of life. Why a
job has to end is in `shoal.jobs.driver.time_limits`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.errors import ShoalError, StoreError
from shoal.jobs.driver.metric_series import MetricSeries
from shoal.jobs.driver.time_limits import Reason, why_end
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.timeouts import HEARTBEAT_S, ROW_CHECK_S, SIGTERM_GRACE_S
from shoal.pool.api import ComputePool
from shoal.pool.journal import usage
from shoal.pool.timeouts import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.gang.nodes_in_use import nodes_in_use
from shoal.training.progress import Progress


def job_nodes() -> tuple[int, float]:
    """Return the number of nodes that this driver's job uses, and the seconds since this number last changed.

    A job without workers uses the head, on which its driver runs.
    """
    nodes, seconds = nodes_in_use()
    return max(1, nodes), seconds


class HeartbeatThread:
    """Thread that writes heartbeats, and sends SIGTERM to its own process when the job has to end; :attr:`reason` then
    says why.

    The thread measures with its monotonic clock how long `last_polled_at` has stayed unchanged. The thread does not
    compare the value with a wall clock, because wall clocks may jump, differ between hosts, and go on while the machine
    is suspended.

    Args:
        store: Store that has the attempt's row.
        key: The attempt.
        metrics: The series of metrics, which heartbeats write into the store.
        timeout: Seconds that the job may run; None: no limit.
        budget_node_hours: Node-hours that the job may use; None: no limit.
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    def __init__(
        self,
        store: Store,
        key: Key,
        metrics: MetricSeries,
        timeout: float | None,
        budget_node_hours: float | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._key = key
        self._metrics = metrics
        self._timeout = timeout
        self._budget = budget_node_hours
        self._used_node_hours = 0.0
        self._done = threading.Event()
        self._monotonic = monotonic
        self._begun = self._polled_since = monotonic()
        self._last_polled_at: float | None = None
        self._renew_at = self._beat_at = self._begun
        self._thread = threading.Thread(target=self._run, name="shoal-heartbeats", daemon=True)
        self._progress: Progress | None = None
        self.reason: Reason | None = None

    def start(self) -> None:
        """Start the thread, which then reads the job's row every 2 s."""
        self._thread.start()

    def keep(self, progress: Progress) -> None:
        """Remember the training's progress, which the next heartbeat writes into the job's row.

        The method may be called often and from any thread.
        """
        self._progress = progress

    @property
    def progress(self) -> dict[str, Any] | None:
        """Return the latest progress given to :meth:`keep`, as JSON for the job's row; None before the first call."""
        return None if self._progress is None else self._progress.document()

    def stop(self) -> None:
        """Stop the thread. After this call, the thread does not end this process."""
        self._done.set()

    def _renew_lease(self, job: Job | None) -> None:
        """Renew the job's lease of nodes whenever a third of its duration has passed. The job then keeps the nodes."""
        if job is None or self._monotonic() < self._renew_at:
            return
        self._renew_at = self._monotonic() + LEASE_TTL / 3
        try:
            ComputePool(job.pool, holder=job.holder, store=self._store).renew()
        except ShoalError as error:
            print(f"the lease of {job.holder} could not be renewed: {error}", flush=True)

    def look(self) -> tuple[Job | None, Reason | None]:
        """Read the job's row from the store; at most every 5 s, also write a heartbeat, the progress and new metrics.

        Returns:
            The row, and the reason why the job has to end. The row is None if it is gone from the store; the reason is
            None if the job may go on.

        Raises:
            StoreError: The store cannot be reached.
        """
        now = self._monotonic()
        beat = now >= self._beat_at
        batch = self._metrics.prepare() if beat else None
        with transaction(self._store, JobStep.BEAT) if beat else self._store.reading(snapshot=False) as session:
            job = session.get(Job, (self._key.job_id, self._key.attempt))
            if batch and job is not None and job.state is JobState.RUNNING:
                job.heartbeat_at = time.time()
                job.progress = self.progress or job.progress
                self._metrics.write(batch, session, job)
                nodes, seconds = job_nodes()
                usage.job_uses(session, job, nodes, time.time(), since_s=seconds)
                if self._budget is not None:
                    self._used_node_hours = usage.of_job(session, job.id, time.time()) / 3600
                self._beat_at = now + HEARTBEAT_S
            else:
                batch = None
        if batch:
            self._metrics.written(batch)
        if job is not None and job.last_polled_at != self._last_polled_at:
            self._last_polled_at, self._polled_since = job.last_polled_at, now
        reason = why_end(
            job,
            unasked_for=now - self._polled_since,
            running_for=now - self._begun,
            timeout=self._timeout,
            used_node_hours=self._used_node_hours,
            budget_node_hours=self._budget,
        )
        return job, reason

    def _run(self) -> None:
        while not self._done.wait(ROW_CHECK_S):
            try:
                job, self.reason = self.look()
            except StoreError:
                continue  # the store cannot be reached: the job goes on, and the row is read again in 2 s
            if self.reason is None:
                self._renew_lease(job)
                continue
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._done.wait(SIGTERM_GRACE_S):
                # `os._exit` does no harm, because the job's files are either complete or absent, and the next process
                # that polls the job records the job's end.
                os._exit(1)
            return
