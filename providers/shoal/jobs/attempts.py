"""The rows of jobs: one per attempt, and the only ways they change.

An attempt goes pending -> running -> succeeded, failed or cancelled, and whoever writes an end first has the last word:
a driver that finishes after its job was cancelled changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from shoal.errors import InvalidArgumentError, JobError, JobNotFoundError
from shoal.jobs import ids
from shoal.redaction import redact
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState


@dataclass(frozen=True)
class Order:
    """What is asked for: all of a job's row that its asker decides."""

    job_id: str
    pool: str
    holder: str
    spec: dict[str, Any]
    """As JSON, without credentials; its `question` is what tells two orders apart."""
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

    Pending or running: that one. Succeeded and not yet collected: that one too, for the same question. Otherwise a new
    attempt, its row written before anything is submitted.

    Raises:
        InvalidArgumentError: A job of this id runs, and it is not the one asked for.
    """
    with store.transaction() as session:
        job = _latest(session, order.job_id)
        same = job is not None and job.spec["question"] == order.spec["question"]
        if job is not None and job.state not in JOB_ENDED:
            if not same:
                raise InvalidArgumentError(
                    f'job "{order.job_id}" is {job.state.value} with another spec: wait for it, end it with '
                    f"`shoal jobs cancel {order.job_id}`, or choose another job_id"
                )
            job.asked_at = now
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
            asked_at=now,
            created_at=now,
        )
        session.add(attempt)
        return attempt


def latest(store: Store, job_id: str) -> Job:
    """The newest attempt of a job.

    Raises:
        JobNotFoundError: There is no such job.
    """
    with store.transaction() as session:
        job = _latest(session, job_id)
    if job is None:
        raise JobNotFoundError(f'job "{job_id}" does not exist: `shoal jobs list` shows those that do')
    return job


def load(store: Store, key: Key) -> Job:
    """One attempt.

    Raises:
        JobError: There is none.
    """
    with store.transaction() as session:
        return _get(session, key)


def newest(store: Store, *, pool: str | None, states: Collection[JobState], limit: int) -> list[Job]:
    """Attempts, the newest first, of one pool or of all, in some states or (none given) in any."""
    query = select(Job).order_by(Job.created_at.desc()).limit(limit)
    if pool is not None:
        query = query.where(Job.pool == pool)
    if states:
        query = query.where(Job.state.in_(states))
    with store.transaction() as session:
        return list(session.scalars(query))


def touch(store: Store, key: Key, now: float) -> Job:
    """Read an attempt, and note that somebody asked: a job that nobody asks about ends itself.

    Raises:
        JobError: There is no such attempt.
    """
    with store.transaction() as session:
        job = _get(session, key)
        job.asked_at = now
        return job


def start(store: Store, key: Key, driver: dict[str, Any], now: float) -> Job | None:
    """Pending -> running, by its driver; None when it is not pending, and the driver has nothing to do."""
    with store.transaction() as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or job.state is not JobState.PENDING:
            return None
        job.state, job.driver, job.started_at = JobState.RUNNING, driver, now
        return job


def note_run(store: Store, key: Key, run_id: str) -> None:
    """Write down the MLflow run of an attempt as soon as there is one."""
    with store.transaction() as session:
        _get(session, key).mlflow_run_id = run_id


def end(
    store: Store,
    key: Key,
    state: JobState,
    now: float,
    *,
    error: str | None = None,
    result: dict[str, Any] | None = None,
) -> bool:
    """End an attempt; False when it had ended already, and nothing was changed."""
    assert state in JOB_ENDED
    error = error and redact(error)
    with store.transaction() as session:
        job = _get(session, key)
        if job.state in JOB_ENDED:
            return False
        job.state, job.error, job.result, job.ended_at = state, error, result, now
        return True


def collect(store: Store, key: Key, now: float) -> None:
    """Note that a result was handed out: asking again makes a new attempt."""
    with store.transaction() as session:
        job = _get(session, key)
        job.collected_at = job.collected_at or now


def _latest(session: Session, job_id: str) -> Job | None:
    query = select(Job).where(Job.id == job_id).order_by(Job.attempt.desc()).limit(1).with_for_update()
    return session.scalars(query).first()


def _get(session: Session, key: Key) -> Job:
    job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
    if job is None:
        raise JobError(f'attempt {key.attempt} of job "{key.job_id}" does not exist')
    return job
