"""Write a driver's heartbeats, the progress of its training and its metrics into the store, and end the driver when its
job has to end.

A thread of the driver reads the job's row every 2 s. A heartbeat is the time of the driver's last sign of life. The
driver ends if the job was cancelled, has exceeded its time limit or its budget, or was not polled by any process for
`orphan_after` seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from shoal.errors import ShoalError, StoreError
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files.logs import write_rest
from shoal.jobs.journal.attempts import End, Key, budget_spent
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.jobs.timeouts import HEARTBEAT_S, ROW_CHECK_S, SIGTERM_GRACE_S
from shoal.own_pauses import waited_since
from shoal.pool.api import ComputePool
from shoal.pool.journal import usage
from shoal.pool.timeouts import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState
from shoal.training.gang.placement import nodes_in_use
from shoal.training.host import own_process
from shoal.training.reporting import Progress
from shoal.training.run_config import RunConfig


def why_end(
    job: Job | None, limits: RunConfig, *, unpolled_for: float, running_for: float, used_node_hours: float
) -> End | None:
    """Return the reason why a running job has to end; None if the job may go on."""
    if job is None:
        return End(JobState.CANCELLED, "the job's row was removed from the store")
    if job.state in JOB_ENDED:
        return End(job.state, job.error or f"the state in the job's row is {job.state.value}")
    if job.orphan_after is not None and unpolled_for > job.orphan_after:
        return End(
            JobState.CANCELLED,
            f"no process has polled the job for orphan_after={job.orphan_after:.0f} s: set orphan_after=None to "
            "let a job go on even if no process waits for it",
        )
    timeout, budget = limits.timeout, limits.budget_node_hours
    if timeout is not None and running_for > timeout:
        return End(JobState.FAILED, f"the job ran longer than run_config.timeout={timeout:g} s: raise the timeout")
    if budget is not None and used_node_hours >= budget:
        return End(JobState.FAILED, budget_spent(used_node_hours, budget), error_is_permanent=True)
    return None


def job_nodes() -> tuple[int, float]:
    """Return the number of nodes that this driver's job uses, and the seconds since this number last changed.

    A job without workers uses the head, on which its driver runs.
    """
    nodes, seconds = nodes_in_use()
    return max(1, nodes), seconds


@dataclass(eq=False, repr=False)
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
        limits: Time limit and budget of the job.
        monotonic: Function that returns the seconds of a clock that never jumps.
    """

    store: Store
    key: Key
    metrics: MetricSeries
    limits: RunConfig
    _: KW_ONLY
    monotonic: Callable[[], float] = time.monotonic
    reason: End | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._used_node_hours = 0.0
        self._done = threading.Event()
        self._begun = self._polled_since = self.monotonic()
        self._last_polled_at: float | None = None
        self._renew_at = self._beat_at = self._begun
        self._thread = threading.Thread(target=self._run, name="shoal-heartbeats", daemon=True)
        self._progress: Progress | None = None

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
        if job is None or self.monotonic() < self._renew_at:
            return
        self._renew_at = self.monotonic() + LEASE_TTL / 3
        try:
            ComputePool(job.pool, holder=job.holder, ancestors=job.ancestors, store=self.store, is_named=False).renew()
        except ShoalError as error:
            print(f"the lease of {job.holder} could not be renewed: {error}", flush=True)

    def look(self) -> tuple[Job | None, End | None]:
        """Read the job's row from the store; at most every 5 s, also write a heartbeat, the progress and new metrics.

        Returns:
            The row, and the reason why the job has to end. The row is None if it is gone from the store; the reason is
            None if the job may go on.

        Raises:
            StoreError: The store cannot be reached.
        """
        now = self.monotonic()
        beat = now >= self._beat_at
        batch = self.metrics.prepare() if beat else None
        with transaction(self.store, JobStep.BEAT) if beat else self.store.reading(snapshot=False) as session:
            job = session.get(Job, (self.key.job_id, self.key.attempt))
            if batch is not None and job is not None and job.state is JobState.RUNNING:
                job.heartbeat_at = time.time()
                job.progress = self.progress or job.progress
                self.metrics.write(batch, session, job)
                nodes, seconds = job_nodes()
                usage.job_uses(session, job, nodes, time.time(), since_s=seconds)
                if self.limits.budget_node_hours is not None:
                    self._used_node_hours = usage.of_job(session, job.id, time.time()) / 3600
                self._beat_at = now + HEARTBEAT_S
            else:
                batch = None
        if batch is not None:
            self.metrics.written(batch)
        if job is not None and job.last_polled_at != self._last_polled_at:
            self._last_polled_at, self._polled_since = job.last_polled_at, now
        reason = why_end(
            job,
            self.limits,
            unpolled_for=waited_since(self._polled_since, now),
            running_for=now - self._begun,
            used_node_hours=self._used_node_hours,
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
                own_process.end_now(1, write_rest)
            return
