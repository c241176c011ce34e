"""End a driver whose job was cancelled, orphaned or timed out; a thread of the driver reads the row every 2 s.

The thread also writes the driver's heartbeat, and with it the progress of the training.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.errors import ShoalError, StoreError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.pool.api import ComputePool
from shoal.pool.tunables import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState
from shoal.training.progress import Progress

_PERIOD_S = 2.0
"""Seconds between two reads of the row; Ray's SIGTERM usually ends a cancelled job sooner."""

_HEARTBEAT_S = 5.0
"""Shortest time between two heartbeats in seconds: every running job makes these writes to the store."""

_GRACE_S = 10.0
"""Seconds for the main thread to end the workers and record the end, before the process is killed."""


@dataclass(frozen=True)
class Reason:
    """Reason why a driver has to end, and the final state of its job."""

    state: JobState
    text: str


def why_end(job: Job | None, *, unasked_for: float, running_for: float, timeout: float | None) -> Reason | None:
    """Return why a running job has to end; None while it may go on.

    Args:
        job: The job's row; None if the row is gone.
        unasked_for: Seconds for which no process has polled the job.
        running_for: Seconds since the driver began.
        timeout: Seconds that the job may run; None: no limit.
    """
    if job is None:
        return Reason(JobState.CANCELLED, "the job's row is gone from the store")
    if job.state in JOB_ENDED:
        return Reason(job.state, job.error or f"the state in the job's row is {job.state.value}")
    if job.orphan_after is not None and unasked_for > job.orphan_after:
        return Reason(
            JobState.CANCELLED,
            f"no process has polled the job for orphan_after={job.orphan_after:.0f} s; None there lets a job go on",
        )
    if timeout is not None and running_for > timeout:
        return Reason(JobState.FAILED, f"the job ran longer than run_config.timeout={timeout:g} s")
    return None


class Watchdog:
    """Thread that sends SIGTERM to its own process when the job has to end; :attr:`reason` then says why.

    The watchdog measures by its monotonic clock for how long `last_polled_at` has not changed. Other processes' clocks
    and this host's wall clock may jump, and go on while the machine is suspended.

    Args:
        store: Store that has the attempt's row.
        key: The attempt.
        timeout: Seconds that the job may run; None: no limit.
        monotonic: Returns seconds by a clock that never jumps.
    """

    def __init__(
        self, store: Store, key: Key, timeout: float | None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._key = key
        self._timeout = timeout
        self._done = threading.Event()
        self._monotonic = monotonic
        self._begun = self._polled_since = monotonic()
        self._last_polled_at: float | None = None
        self._renew_at = self._beat_at = self._begun
        self._thread = threading.Thread(target=self._run, name="shoal-watchdog", daemon=True)
        self._progress: Progress | None = None
        self.reason: Reason | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def keep(self, progress: Progress) -> None:
        """Keep the progress of the training for the next heartbeat; may be called often and from any thread."""
        self._progress = progress

    @property
    def progress(self) -> dict[str, Any] | None:
        """Last progress that was kept, as the row stores it; None before the first."""
        return None if self._progress is None else self._progress.document()

    def stop(self) -> None:
        """Stop the thread; the process is not ended any more."""
        self._done.set()

    def _renew_lease(self, job: Job | None) -> None:
        """Renew the lease of the job's holder at intervals, so that it lasts as long as the job."""
        if job is None or self._monotonic() < self._renew_at:
            return
        self._renew_at = self._monotonic() + LEASE_TTL / 3
        try:
            ComputePool(job.pool, holder=job.holder, store=self._store).renew()
        except ShoalError as error:
            print(f"the lease of {job.holder} could not be renewed: {error}", flush=True)

    def look(self) -> tuple[Job | None, Reason | None]:
        """Read the row, and write a heartbeat and the progress if the last heartbeat is old.

        Returns:
            The row, and the reason why the job has to end, or None while it may go on.

        Raises:
            StoreError: The store cannot be reached.
        """
        now = self._monotonic()
        beat = now >= self._beat_at
        with transaction(self._store, JobStep.BEAT) if beat else self._store.reading(snapshot=False) as session:
            job = session.get(Job, (self._key.job_id, self._key.attempt))
            if beat and job is not None and job.state is JobState.RUNNING:
                job.heartbeat_at = time.time()
                job.progress = self.progress or job.progress
                self._beat_at = now + _HEARTBEAT_S
        if job is not None and job.last_polled_at != self._last_polled_at:
            self._last_polled_at, self._polled_since = job.last_polled_at, now
        reason = why_end(
            job, unasked_for=now - self._polled_since, running_for=now - self._begun, timeout=self._timeout
        )
        return job, reason

    def _run(self) -> None:
        while not self._done.wait(_PERIOD_S):
            try:
                job, self.reason = self.look()
            except StoreError:
                continue  # training goes on while the store cannot be reached
            if self.reason is None:
                self._renew_lease(job)
                continue
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._done.wait(_GRACE_S):
                os._exit(1)  # files are complete or absent; the next process that polls the job records its end
            return
