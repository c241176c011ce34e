"""End an attempt: record the end, stop its driver, and remove the files that it has left behind."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.errors import JobError, PoolDownError, PoolNotFoundError
from shoal.jobs import credentials
from shoal.jobs.files import artifacts, staged_data_claims, working_folder
from shoal.jobs.head_client import HeadBusyError, HeadGoneError, JobClient
from shoal.jobs.journal import attempts
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.kind import parse_spec
from shoal.jobs.reconcile import look
from shoal.jobs.reconcile.decide import End, Silence
from shoal.jobs.reconcile.target import Target
from shoal.jobs.timeouts import SHORTEST_PAUSE_S, STOP_PATIENCE_S
from shoal.state.home import is_own_store
from shoal.state.schema import JOB_ACTIVE, Job, JobState, Pool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cancellation:
    """Result of `cancel`.

    Attributes:
        is_done: Whether the call cancelled the attempt. False: it had ended already, or must not be cancelled.
        left: Sentence about a driver that may still run.
    """

    is_done: bool
    left: str | None = None


def record(target: Target, job: Job, end: End) -> bool:
    """Record the end of an attempt, unless its state has changed since the given row was read."""
    if not attempts.end(
        target.store, target.key, end.state, target.clock(), seen={job.state}, error=end.reason, actor=target.actor
    ):
        return False
    _tidy(target, job)
    return True


def cancel(
    target: Target,
    job: Job,
    reason: str,
    *,
    seen: Collection[JobState] = JOB_ACTIVE,
    most_submissions: int | None = None,
    by_user: bool = False,
) -> Cancellation:
    """Cancel an attempt and stop its driver. If a user cancels it, no task that waits for the attempt is retried."""
    if not attempts.end(
        target.store,
        target.key,
        JobState.CANCELLED,
        target.clock(),
        seen=seen,
        most_submissions=most_submissions,
        error=reason,
        error_is_permanent=by_user,
        actor=target.actor,
    ):
        return Cancellation(is_done=False)
    left = None
    if not is_waiting(job):
        if look.find_head(target) is Silence.ELSEWHERE:
            # The driver still uses the files that `_tidy` would remove.
            with target.store.reading() as session:
                host = session.get_one(Pool, target.pool).host
            left = f"the driver of job {job.id} ends by itself on host {host or 'of its team'} within seconds"
            return Cancellation(is_done=True, left=left)
        left = _stop_driver(target, job)
    _tidy(target, job)
    return Cancellation(is_done=True, left=left)


def _stop_driver(target: Target, job: Job) -> str | None:
    """Stop the driver through the head's Job API, and wait up to 15 s until the driver has ended.

    A driver that runs on reads the cancellation from the job's row and ends by itself. Return a sentence about it.
    """
    until = target.monotonic() + STOP_PATIENCE_S
    stopped = False
    try:
        while target.monotonic() < until:
            view = look.view(target, job)
            if view.silence in (Silence.POOL_GONE, Silence.HEAD_REPLACED) or (view.ray_job and view.ray_job.ended):
                break
            if view.silence is None and view.ray_job is None:
                break  # the head has no record of the attempt, so there is no driver to wait for
            if not stopped:
                stopped = _request_stop(target)
            target.sleep(SHORTEST_PAUSE_S, None)
    except JobError as error:
        return (
            f"the driver of job {job.id} ends by itself within seconds; the call did not wait for this, because the "
            f"pool's head reported an error: {error}"
        )
    return None


def _request_stop(target: Target) -> bool:
    try:
        client = JobClient.at(target.endpoint_of(target.pool))
        with act(JobStep.STOP):
            return client.stop(target.key.submission_id)
    except (HeadBusyError, HeadGoneError, PoolDownError, PoolNotFoundError):
        return False


def _tidy(target: Target, job: Job) -> None:
    """Remove the files that an ended attempt has left behind: credentials, staged data and unfinished artifacts. In
    another store than that of this process, a sweep of the pool's host removes them."""
    if not is_own_store():
        return
    spec = parse_spec(job.spec)
    with act(JobStep.TIDY):
        with _logged(job):
            credentials.discard(target.key.submission_id)
        with _logged(job):
            working_folder.discard(target.key.submission_id)
        with _logged(job):
            staged_data_claims.give_up(target.key, spec.staged())
        with _logged(job):
            results = artifacts.folder(target.key, spec.run_config.artifact_location)
            artifacts.discard_unfinished(results, artifacts.claim_of(target.store, target.key))


@contextmanager
def _logged(job: Job) -> Iterator[None]:
    """Only log errors of a `with` block that removes files, because the attempt's end is recorded already."""
    try:
        yield
    except Exception as error:  # Different storages raise different exceptions, so all types are caught.
        log.warning("job %s, attempt %d: some files could not be removed: %s", job.id, job.attempt, error)
