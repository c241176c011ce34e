"""Ends a driver whose job is not wanted any more: a thread of the driver that looks at its row every few seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import ShoalError, StoreError
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.pool.api import ComputePool
from shoal.pool.tunables import LEASE_TTL
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState

_PERIOD_S = 2.0
"""How soon a cancelled job notices by itself; Ray's signal is usually sooner."""

_HEARTBEAT_S = 5.0
"""The shortest time between two signs of life: each is a write to the store, and every job that runs makes them."""

_GRACE_S = 10.0
"""How long the main thread may take to end the gang and record the end, before the process is killed."""


@dataclass(frozen=True)
class Reason:
    """Why a driver has to end, and as what its job counts."""

    state: JobState
    text: str


def why_end(job: Job | None, *, unasked_for: float, running_for: float, timeout: float | None) -> Reason | None:
    """Whether a job that runs may go on.

    Args:
        job: Its row.
        unasked_for: Seconds for which nobody was seen to ask about it.
        running_for: Seconds since its driver began.
        timeout: The most seconds it may run.
    """
    if job is None:
        return Reason(JobState.CANCELLED, "its row is gone from the store")
    if job.state in JOB_ENDED:
        return Reason(job.state, job.error or f"its row says {job.state.value}")
    if job.orphan_after is not None and unasked_for > job.orphan_after:
        return Reason(
            JobState.CANCELLED,
            f"nobody has asked about it for {job.orphan_after:.0f} s (orphan_after; None for a detached job)",
        )
    if timeout is not None and running_for > timeout:
        return Reason(JobState.FAILED, f"it ran longer than run_config.timeout={timeout:g} s")
    return None


class Watchdog:
    """Sends SIGTERM to its own process when the job has to end; :attr:`reason` says why.

    It counts by its own monotonic clock how long the row has not changed. Other processes' clocks, and this host's wall
    clock, may jump and run on while the machine is suspended.

    Args:
        store: Where the row is.
        key: The attempt.
        timeout: The most seconds it may run.
        monotonic: Seconds by a clock that never jumps.
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
        self.reason: Reason | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._done.set()

    def _renew_lease(self, job: Job | None) -> None:
        """Renew the run's lease, which lives as long as its job, even where the run itself cannot renew it."""
        if job is None or self._monotonic() < self._renew_at:
            return
        self._renew_at = self._monotonic() + LEASE_TTL / 3
        try:
            ComputePool(job.pool, holder=job.holder, store=self._store).renew()
        except ShoalError as error:
            print(f"the lease of {job.holder} could not be renewed: {error}", flush=True)

    def look(self) -> tuple[Job | None, Reason | None]:
        """Read the row, and leave a sign of life there where the last one is old.

        Returns:
            The row, and why the job has to end; None while it may go on.

        Raises:
            StoreError: The store cannot be reached.
        """
        now = self._monotonic()
        beat = now >= self._beat_at
        with transaction(self._store, JobStep.BEAT) if beat else self._store.reading() as session:
            job = session.get(Job, (self._key.job_id, self._key.attempt))
            if beat and job is not None and job.state is JobState.RUNNING:
                job.heartbeat_at = time.time()
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
                os._exit(1)  # its files are complete or absent; the next process that asks for the job ends the row
            return
