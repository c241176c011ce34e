"""Act on an attempt: queue it, send it to its pool's head, cancel it, record its end, remove its files."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import get_args

from shoal.boosting_libraries import MLFLOW_STORE, Framework
from shoal.errors import JobError, PoolDownError, PoolNotFoundError
from shoal.jobs import credentials, remote_files
from shoal.jobs.credentials import Secrets
from shoal.jobs.files import artifacts, staged_rows, storage
from shoal.jobs.journal import attempts, job_queue
from shoal.jobs.journal.attempts import End
from shoal.jobs.journal.job_queue import Admission
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.journal.steps import JobStep, act
from shoal.jobs.kind import parse_spec
from shoal.jobs.reconcile import look
from shoal.jobs.reconcile.decide import Silence
from shoal.jobs.reconcile.look import HeadBusyError, HeadGoneError, JobClient, Target, address, find_head
from shoal.jobs.timeouts import STOP_PATIENCE_S
from shoal.pool.endpoint import LIBRARIES, NO_GCS, Endpoint, driver_command, is_on_loopback
from shoal.pool.timeouts import WAIT_PERIOD
from shoal.state.home import is_own_store
from shoal.state.schema import JOB_ACTIVE, Job, JobState, Pool

log = logging.getLogger(__name__)


@dataclass
class Supplies:
    """What only the process that submits a job can give to the job.

    Attributes:
        secrets: Credentials for the driver. None: another process has submitted the job.
        files: Code and frames that are sent with the job to a `ray://` pool, which is an existing Ray cluster: the path
            on this machine of each file, by its path in the package.
        end_on_interrupt: Whether Ctrl-C in this process ends the job.
    """

    secrets: Secrets | None = None
    files: Mapping[str, str] | None = None
    end_on_interrupt: bool = False


def send(target: Target, supplies: Supplies) -> bool:
    """Submit the attempt to its pool's head if the pool has room for it; otherwise put the attempt into the queue.

    Raises:
        PoolDownError: The pool is down.
        JobError: The head does not answer, or refused the attempt, which is now recorded as failed.
    """
    is_usable = False
    with _failing(target, supplies):
        # The credentials are written before the attempt joins the queue, because any process may send a queued attempt
        # to the head, and the driver then needs the credentials.
        submission_id = target.key.submission_id
        if supplies.secrets is not None and not attempts.load(target.store, target.key).needs_credentials:
            with act(JobStep.HAND_OVER):
                credentials.hand_over(submission_id, supplies.secrets)
        head = target.endpoint_of(target.pool)
        if supplies.files:
            with act(JobStep.HAND_OVER):
                JobClient.at(head).upload(remote_files.name(submission_id), remote_files.archived(supplies.files))
        admitted = job_queue.admit(target.store, target.key, target.clock(), address(head))
        is_usable = admitted is Admission.WAITS or _submit(target, head)
    return is_usable


def admit(target: Target) -> None:
    """Submit a waiting attempt if its pool has room for it and the pool's head can be reached; otherwise do nothing."""
    head = find_head(target)
    if isinstance(head, Silence):
        return
    if job_queue.admit(target.store, target.key, target.clock(), address(head)) is not Admission.NOW:
        return
    try:
        with _failing(target, Supplies()):
            try:
                _submit(target, head)
            except (HeadBusyError, HeadGoneError, PoolDownError) as error:
                # The head may have received this submission in spite of the error. In that case the head starts the
                # driver, and the driver runs as usual.
                job_queue.put_back(target.store, target.key)
                log.warning("job %s, attempt %d waits again: %s", target.key.job_id, target.key.attempt, error)
    except (JobError, PoolDownError) as error:
        log.warning("job %s, attempt %d was not started: %s", target.key.job_id, target.key.attempt, error)


def _submit(target: Target, head: Endpoint) -> bool:
    client = JobClient.at(head)
    job = attempts.load(target.store, target.key)
    submitted_to = job.run_config.get("pool_name", job.pool)
    if submitted_to != job.pool:
        raise JobError(
            f'the job was submitted to pool "{submitted_to}", but its row in the store names pool "{job.pool}", which '
            "has not accepted it: submit it to this pool",
            permanent=True,
        )
    submission_id = target.key.submission_id
    with act(JobStep.SEND):
        submitted = client.submit(
            _entrypoint(job),
            submission_id,
            {"shoal_job": job.id, "attempt": str(job.attempt), LIBRARIES: " ".join(_libraries(job))},
            package=remote_files.name(submission_id) if remote_files.is_used(job.spec) else None,
        )
    if not submitted:
        _discard_unneeded_credentials(target)
    return submitted


@contextmanager
def _failing(target: Target, supplies: Supplies) -> Iterator[None]:
    """Record the attempt as failed if the `with` block, which sends the attempt to the head, raises an error."""
    try:
        yield
    except BaseException as error:
        if supplies.secrets is None and not isinstance(error, Exception):
            # Another process has submitted the job, so Ctrl-C in this process must not end it. Another process sends
            # the job to the head later.
            raise
        # The head may start a driver in spite of the error. Such a driver finds that the attempt has ended, and exits.
        # An attempt that another process has submitted meanwhile is not recorded as failed.
        reason = f"the job could not be submitted: {str(error) or type(error).__name__}"
        if supplies.secrets is not None:
            reason = supplies.secrets.redact(reason)
        interrupted = supplies.end_on_interrupt and isinstance(error, KeyboardInterrupt)
        seen = JOB_ACTIVE if interrupted else {JobState.PENDING}
        attempts.end(target.store, target.key, JobState.FAILED, target.clock(), seen=seen, error=reason)
        job = _discard_unneeded_credentials(target)
        if not isinstance(error, Exception) or job.state not in (JobState.RUNNING, JobState.SUCCEEDED):
            raise


def _discard_unneeded_credentials(target: Target) -> Job:
    """Delete the file with the attempt's credentials unless a driver still has to read it; return the job's row."""
    job = attempts.load(target.store, target.key)
    # The driver reads the file while the row's state is still PENDING. If the submitter writes the file after this
    # check, the driver removes the file when the driver ends.
    if job.state is not JobState.PENDING:
        credentials.discard(target.key.submission_id)
    return job


def _entrypoint(job: Job) -> list[str]:
    """Return the command that starts the driver with the Python of the process that first submitted the job.

    If the driver starts the workers of a training itself, the command names the library, so that the driver and its
    workers share the library's memory.
    """
    python = str(job.submitter["python"])
    gcs = job.endpoint["gcs"]
    shared = [job.framework] if job.framework in get_args(Framework) and (gcs == NO_GCS or is_on_loopback(gcs)) else []
    return driver_command(python, job.id, str(job.attempt), *shared)


def _libraries(job: Job) -> list[str]:
    """Return the libraries that the driver imports. The head imports them once for this driver and all later ones."""
    ray = [] if job.endpoint["gcs"] == NO_GCS else ["ray"]
    trained = (job.framework, (job.spec.get("train") or {}).get("framework"))
    framework = [name for name in get_args(Framework) if name in trained]
    tracking = job.spec.get("tracking")
    mlflow = [] if tracking is None else ["mlflow"] if tracking.get("uri") else ["mlflow", MLFLOW_STORE]
    # On a pool with Ray, Ray may start the workers.
    torch = ["torch"] if job.framework == "pytorch" and not ray else []
    return [*ray, *framework, *mlflow, *torch]


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
        target.store, target.key, end.state, target.clock(), seen={job.state}, error=end.error, actor=target.actor
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
                with suppress(HeadBusyError, HeadGoneError, PoolDownError, PoolNotFoundError):
                    client = JobClient.at(target.endpoint_of(target.pool))
                    with act(JobStep.STOP):
                        stopped = client.stop(target.key.submission_id)
            target.sleep(WAIT_PERIOD, None)
    except JobError as error:
        return (
            f"the driver of job {job.id} ends by itself within seconds; the call did not wait for this, because the "
            f"pool's head reported an error: {error}"
        )
    return None


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
            storage.discard(target.key.submission_id)
        with _logged(job):
            staged_rows.give_up(target.key, spec.staged())
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
