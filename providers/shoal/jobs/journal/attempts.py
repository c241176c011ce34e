"""Read and change the rows of jobs, one row per attempt.

An attempt goes from pending to running, and then to succeeded, failed or cancelled. Every change checks the state that
the attempt has at that moment, so that a decision on stale data changes nothing, and the first recorded end stays.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, defer

from shoal.errors import InvalidArgumentError, JobError, JobNotFoundError
from shoal.jobs import ids
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.redaction import redact
from shoal.state import Store, stamps
from shoal.state.process import ProcessId
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job, JobState


@dataclass(frozen=True)
class Order:
    """The fields of a job's row that the submitter decides."""

    job_id: str
    pool: str
    holder: str
    spec: dict[str, Any]
    """Spec as JSON, without credentials. The key `question` has the fingerprint, which is equal for equal jobs."""
    endpoint: dict[str, str]
    orphan_after: float | None
    priority: int = 0
    gang: dict[str, Any] | None = None
    """The workers that the job asks for, see `shoal.jobs.queue.Gang`."""


@dataclass(frozen=True)
class Key:
    """Identifies one attempt of one job."""

    job_id: str
    attempt: int

    @property
    def submission_id(self) -> str:
        """Id of the attempt in Ray."""
        return ids.submission_id(self.job_id, self.attempt)


def ask(store: Store, order: Order, now: float) -> Job:
    """Return the attempt that fulfils an order; write the row of a new attempt if there is none.

    The newest attempt fulfils the order if its fingerprint is the same and it is pending, running, or succeeded without
    its result having been collected. A new row is written before the attempt is submitted.

    Raises:
        InvalidArgumentError: The newest attempt is pending or running, and has another fingerprint.
    """
    with transaction(store, JobStep.ASK) as session:
        job = _latest(session, order.job_id)
        same = job is not None and job.spec["question"] == order.spec["question"]
        if job is not None and job.state not in JOB_ENDED:
            if not same:
                raise InvalidArgumentError(
                    f'job "{order.job_id}" is {job.state.value} with another spec: wait until it has ended, cancel '
                    f"it with `shoal jobs cancel {order.job_id}`, or choose another job_id"
                )
            note_polled(job, now)
            return job
        if job is not None and same and job.state is JobState.SUCCEEDED and job.collected_at is None:
            return job
        attempt = Job(
            id=order.job_id,
            attempt=job.attempt + 1 if job else 1,
            pool=order.pool,
            holder=order.holder,
            spec=order.spec,
            state=JobState.PENDING,
            endpoint=order.endpoint,
            orphan_after=order.orphan_after,
            last_polled_at=now,
            last_polled_clock=stamps.stamp(now),
            submitter=ProcessId.mine().to_json() | {"python": sys.executable},
            priority=order.priority,
            gang=order.gang,
            created_at=now,
        )
        session.add(attempt)
        return attempt


def latest(store: Store, job_id: str) -> Job:
    """Return the newest attempt of a job.

    Raises:
        JobNotFoundError: There is no such job.
    """
    with store.reading() as session:
        job = session.scalars(_newest_of(job_id)).first()
    if job is None:
        raise JobNotFoundError(f'job "{job_id}" does not exist: `shoal jobs list` shows all jobs')
    return job


def load(store: Store, key: Key) -> Job:
    """Return the row of an attempt.

    Raises:
        JobError: There is no such attempt.
    """
    with store.reading(snapshot=False) as session:
        return get(session, key, lock=False)


def is_current(store: Store, key: Key) -> bool:
    """Return whether an attempt is running and is the newest of its job."""
    query = select(Job.attempt, Job.state).where(Job.id == key.job_id).order_by(Job.attempt.desc()).limit(1)
    with store.reading() as session:
        return session.execute(query).one_or_none() == (key.attempt, JobState.RUNNING)


def first_asked(store: Store, job_id: str) -> float | None:
    """Return when a job's first attempt was submitted, which distinguishes jobs of the same id in two stores."""
    with store.reading() as session:
        return session.scalar(select(func.min(Job.created_at)).where(Job.id == job_id))


def previous_run(store: Store, key: Key) -> tuple[str, JobState] | None:
    """Return the MLflow run id of the previous attempt and its state; None if that attempt had no MLflow run."""
    with store.reading() as session:
        job = session.get(Job, (key.job_id, key.attempt - 1))
    return None if job is None or job.mlflow_run_id is None else (job.mlflow_run_id, job.state)


def newest(store: Store, *, pool: str | None, states: Collection[JobState], limit: int) -> list[Job]:
    """List attempts without their specs, the newest first; `pool=None` and empty `states` select all of them."""
    query = select(Job).order_by(Job.created_at.desc()).limit(limit).options(defer(Job.spec))
    if pool is not None:
        query = query.where(Job.pool == pool)
    if states:
        query = query.where(Job.state.in_(states))
    with store.reading() as session:
        return list(session.scalars(query))


def touch(store: Store, key: Key, now: float) -> Job:
    """Read an attempt and update its `last_polled_at`: a job that no process polls ends itself.

    Raises:
        JobError: There is no such attempt.
    """
    with transaction(store, JobStep.TOUCH) as session:
        job = get(session, key)
        note_polled(job, now)
        return job


def start(store: Store, key: Key, driver: dict[str, Any], now: float) -> Job | None:
    """Record that a pending attempt runs; return None if the attempt is not pending, so that its driver must exit."""
    with transaction(store, JobStep.START) as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or job.state is not JobState.PENDING:
            return None
        job.state, job.driver, job.started_at = JobState.RUNNING, driver, now
        return job


def note_run(store: Store, key: Key, run_id: str) -> None:
    """Record the MLflow run of an attempt."""
    with transaction(store, JobStep.NOTE_RUN) as session:
        get(session, key).mlflow_run_id = run_id


def end(
    store: Store,
    key: Key,
    state: JobState,
    now: float,
    *,
    seen: Collection[JobState] = JOB_ACTIVE,
    error: str | None = None,
    result: dict[str, Any] | None = None,
    results_digest: str | None = None,
    progress: dict[str, Any] | None = None,
) -> bool:
    """Record the end of an attempt if it is in one of the given states.

    Args:
        store: Store that has the attempt's row.
        key: The attempt.
        state: Final state of the attempt.
        now: Seconds since the epoch.
        seen: States from which the attempt may be ended, usually the state that the caller has read.
        error: Reason why the attempt has no result.
        result: Result of the attempt.
        results_digest: SHA-256 of the file that `result` names as `results_path`.
        progress: Last progress of the training; None keeps the one in the row.

    Returns:
        False if the attempt was in another state; the row is then unchanged.

    Raises:
        JobError: There is no such attempt.
    """
    assert state in JOB_ENDED
    error = error and redact(error)
    with transaction(store, JobStep.END) as session:
        job = get(session, key)
        if job.state not in seen or job.state in JOB_ENDED:
            return False
        job.state, job.error, job.result, job.ended_at = state, error, result, now
        job.results_digest = results_digest
        job.progress = progress or job.progress
        return True


def collect(store: Store, key: Key, now: float) -> None:
    """Record that the result was collected, so that the next submission makes a new attempt."""
    with transaction(store, JobStep.COLLECT) as session:
        job = get(session, key)
        job.collected_at = job.collected_at or now


def note_polled(job: Job, now: float) -> None:
    """Update an attempt's `last_polled_at`, inside the caller's transaction."""
    job.last_polled_at, job.last_polled_clock = now, stamps.stamp(now)


def _latest(session: Session, job_id: str) -> Job | None:
    return session.scalars(_newest_of(job_id).with_for_update()).first()


def _newest_of(job_id: str) -> Select[Job]:
    return select(Job).where(Job.id == job_id).order_by(Job.attempt.desc()).limit(1)


def get(session: Session, key: Key, *, lock: bool = True) -> Job:
    """Return the row of an attempt, inside the caller's transaction.

    Raises:
        JobError: There is no such attempt.
    """
    job = session.get(Job, (key.job_id, key.attempt), with_for_update=lock)
    if job is None:
        raise JobError(f'attempt {key.attempt} of job "{key.job_id}" does not exist: see `shoal jobs list`')
    return job
