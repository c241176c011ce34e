"""Ends a driver whose job is not wanted any more: a thread of the driver that looks at its row every few seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass

from shoal.errors import ShoalError, StoreError
from shoal.jobs.attempts import Key
from shoal.pool.api import ComputePool
from shoal.pool.tunables import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState

_PERIOD_S = 2.0
"""How soon a cancelled job notices by itself; Ray's signal is usually sooner."""

_GRACE_S = 10.0
"""How long the main thread may take to end the gang and say goodbye, before the process is ended under it."""


@dataclass(frozen=True)
class Reason:
    """Why a driver has to end, and as what its job counts."""

    state: JobState
    text: str


def why_end(job: Job | None, now: float, timeout: float | None) -> Reason | None:
    """Whether a job that runs may go on.

    Args:
        job: Its row.
        now: Seconds since the epoch.
        timeout: The most seconds it may run.
    """
    if job is None:
        return Reason(JobState.CANCELLED, "its row is gone from the store")
    if job.state in JOB_ENDED:
        return Reason(job.state, job.error or f"its row says {job.state.value}")
    if job.orphan_after is not None and now - job.asked_at > job.orphan_after:
        return Reason(
            JobState.CANCELLED,
            f"nobody has asked about it for {job.orphan_after:.0f} s (orphan_after; None for a detached job)",
        )
    if timeout is not None and job.started_at is not None and now - job.started_at > timeout:
        return Reason(JobState.FAILED, f"it ran longer than run_config.timeout={timeout:g} s")
    return None


class Watchdog:
    """Sends SIGTERM to its own process when the job has to end; :attr:`reason` says why.

    Args:
        store: Where the row is.
        key: The attempt.
        timeout: The most seconds it may run.
    """

    def __init__(self, store: Store, key: Key, timeout: float | None) -> None:
        self._store = store
        self._key = key
        self._timeout = timeout
        self._done = threading.Event()
        self._renew_at = 0.0
        self._thread = threading.Thread(target=self._run, name="shoal-watchdog", daemon=True)
        self.reason: Reason | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._done.set()

    def _renew_lease(self, job: Job | None) -> None:
        """A run's lease lives as long as its job does, even where whoever asked for it has no time to renew it."""
        if job is None or time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + LEASE_TTL / 3
        try:
            ComputePool(job.pool, holder=job.holder, store=self._store).renew()
        except ShoalError as error:
            print(f"the lease of {job.holder} could not be renewed: {error}", flush=True)

    def _run(self) -> None:
        while not self._done.wait(_PERIOD_S):
            try:
                with self._store.reading() as session:
                    job = session.get(Job, (self._key.job_id, self._key.attempt))
            except StoreError:
                continue  # a store that cannot be reached is no reason to throw hours of training away
            self.reason = why_end(job, time.time(), self._timeout)
            if self.reason is None:
                self._renew_lease(job)
                continue
            os.kill(os.getpid(), signal.SIGTERM)
            if not self._done.wait(_GRACE_S):
                os._exit(1)  # what it wrote so far is complete or absent; the row is set right by whoever asks next
            return
