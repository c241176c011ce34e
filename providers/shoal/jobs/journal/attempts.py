"""The rows of jobs: one per attempt, and the only ways they change.

An attempt goes pending -> running -> succeeded, failed or cancelled. Every change names the attempt and the states that
it may change: one that was decided on an old look at the row changes nothing, and the first end stays.
"""

from __future__ import annotations

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
    """What is asked for: all of a job's row that its asker decides."""

    job_id: str
    pool: str
    holder: str
    spec: dict[str, Any]
    """As JSON, without credentials; two orders differ if their fingerprints do, which are stored as `question`."""
    endpoint: dict[str, str]
    orphan_after: float | None


@dataclass(frozen=True)
class Key:
    """One attempt of one job."""

    job_id: str
    attempt: int

    @property
    def submission_id(self) -> str:
        """What Ray knows it by."""
        return ids.submission_id(self.job_id, self.attempt)


def ask(store: Store, order: Order, now: float) -> Job:
    """Find the attempt that answers an order, or make a new one.

    Pending or running: that one. Succeeded and not yet collected: that one too, for the same fingerprint. Otherwise a
    new attempt, its row written before anything is submitted.

    Raises:
        InvalidArgumentError: A job of this id runs, and it is not the one asked for.
    """
    with transaction(store, JobStep.ASK) as session:
        job = _latest(session, order.job_id)
        same = job is not None and job.spec["question"] == order.spec["question"]
        if job is not None and job.state not in JOB_ENDED:
            if not same:
                raise InvalidArgumentError(
                    f'job "{order.job_id}" is {job.state.value} with another spec: wait for it, end it with '
                    f"`shoal jobs cancel {order.job_id}`, or choose another job_id"
                )
            _note_asked(job, now)
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
            submitter=ProcessId.mine().to_json(),
            created_at=now,
        )
        session.add(attempt)
        return attempt


def latest(store: Store, job_id: str) -> Job:
    """The newest attempt of a job.

    Raises:
        JobNotFoundError: There is no such job.
    """
    with store.reading() as session:
        job = session.scalars(_newest_of(job_id)).first()
    if job is None:
        raise JobNotFoundError(f'job "{job_id}" does not exist: `shoal jobs list` shows those that do')
    return job


def load(store: Store, key: Key) -> Job:
    """One attempt.

    Raises:
        JobError: There is none.
    """
    with store.reading() as session:
        return _get(session, key, lock=False)


def is_current(store: Store, key: Key) -> bool:
    """Whether an attempt runs, and is the newest of its job."""
    query = select(Job.attempt, Job.state).where(Job.id == key.job_id).order_by(Job.attempt.desc()).limit(1)
    with store.reading() as session:
        return session.execute(query).one_or_none() == (key.attempt, JobState.RUNNING)


def first_asked(store: Store, job_id: str) -> float | None:
    """When a job's first attempt was asked for; it tells apart the jobs of one id in two stores."""
    with store.reading() as session:
        return session.scalar(select(func.min(Job.created_at)).where(Job.id == job_id))


def previous_run(store: Store, key: Key) -> tuple[str, JobState] | None:
    """The MLflow run of the attempt before, and how that attempt ended; None where it had no run."""
    with store.reading() as session:
        job = session.get(Job, (key.job_id, key.attempt - 1))
    return None if job is None or job.mlflow_run_id is None else (job.mlflow_run_id, job.state)


def newest(store: Store, *, pool: str | None, states: Collection[JobState], limit: int) -> list[Job]:
    """Attempts without their specs, the newest first, of one pool or of all, in some states or (none given) in any."""
    query = select(Job).order_by(Job.created_at.desc()).limit(limit).options(defer(Job.spec))
    if pool is not None:
        query = query.where(Job.pool == pool)
    if states:
        query = query.where(Job.state.in_(states))
    with store.reading() as session:
        return list(session.scalars(query))


def touch(store: Store, key: Key, now: float) -> Job:
    """Read an attempt, and note that somebody asked: a job that nobody asks about ends itself.

    Raises:
        JobError: There is no such attempt.
    """
    with transaction(store, JobStep.TOUCH) as session:
        job = _get(session, key)
        _note_asked(job, now)
        return job


def start(store: Store, key: Key, driver: dict[str, Any], now: float) -> Job | None:
    """Pending -> running, by its driver; None when it is not pending, and the driver has nothing to do."""
    with transaction(store, JobStep.START) as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or job.state is not JobState.PENDING:
            return None
        job.state, job.driver, job.started_at = JobState.RUNNING, driver, now
        return job


def note_run(store: Store, key: Key, run_id: str) -> None:
    """Write down the MLflow run of an attempt as soon as there is one."""
    with transaction(store, JobStep.NOTE_RUN) as session:
        _get(session, key).mlflow_run_id = run_id


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
) -> bool:
    """End an attempt that is in a given state.

    Args:
        store: Where its row is.
        key: The attempt.
        state: How it ends.
        now: Seconds since the epoch.
        seen: The states in which this end is right, usually the one that the decision rests on.
        error: Why it has no result.
        result: What it returned.
        results_digest: SHA-256 of the file that `result` names as `results_path`.

    Returns:
        False when it is in another state, and nothing was changed.

    Raises:
        JobError: There is no such attempt.
    """
    assert state in JOB_ENDED
    error = error and redact(error)
    with transaction(store, JobStep.END) as session:
        job = _get(session, key)
        if job.state not in seen or job.state in JOB_ENDED:
            return False
        job.state, job.error, job.result, job.ended_at = state, error, result, now
        job.results_digest = results_digest
        return True


def collect(store: Store, key: Key, now: float) -> None:
    """Note that a result was handed out: asking again makes a new attempt."""
    with transaction(store, JobStep.COLLECT) as session:
        job = _get(session, key)
        job.collected_at = job.collected_at or now


def _note_asked(job: Job, now: float) -> None:
    job.last_polled_at, job.last_polled_clock = now, stamps.stamp(now)


def _latest(session: Session, job_id: str) -> Job | None:
    return session.scalars(_newest_of(job_id).with_for_update()).first()


def _newest_of(job_id: str) -> Select[Job]:
    return select(Job).where(Job.id == job_id).order_by(Job.attempt.desc()).limit(1)


def _get(session: Session, key: Key, *, lock: bool = True) -> Job:
    job = session.get(Job, (key.job_id, key.attempt), with_for_update=lock)
    if job is None:
        raise JobError(f'attempt {key.attempt} of job "{key.job_id}" does not exist')
    return job
