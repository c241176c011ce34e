"""Read attempts of jobs as users see them, one or all, and detect changes of the store with one fast query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, String, cast, func, or_, select

from shoal.jobs.journal import job_queue
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.results import JobResult
from shoal.jobs.scheduling import Place
from shoal.pool.holder import DagRunHolder
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.state.schema import (
    JOB_ENDED,
    Action,
    Demand,
    Job,
    JobState,
    Lease,
    Node,
    Operation,
    Pool,
    Promotion,
)
from shoal.training.reporting import Progress

MOST_LINES = 20_000
"""Largest number of attempts that `job_lines` returns."""


@dataclass(frozen=True, kw_only=True)
class AttemptFields:
    """Values that `JobLine` and `shoal.jobs.JobStatus` have in common; the latter describes them."""

    job_id: str
    attempt: int
    pool: str
    holder: str
    task_key: str | None
    task_name: str | None
    label: str | None
    team: str | None
    state: JobState
    error: str | None
    mlflow_run_id: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    progress: Progress | None
    priority: int
    position: int | None

    @property
    def task(self) -> str | None:
        """Name of the DAG and task that submitted the job, such as ``retrain.train[3]``, or of the flow and task; None
        for a job of another submitter."""
        run = DagRunHolder.of(self.holder)
        if run is None or self.task_key is None:
            return self.task_name
        task_id, _, index = self.task_key.rpartition("/")
        return f"{run.dag_id}.{task_id}" + ("" if index == "-1" else f"[{index}]")

    @property
    def about(self) -> str:
        """What the job is about, and the task that submitted it, as far as both are known."""
        return " by ".join(filter(None, (self.label, self.task)))


@dataclass(frozen=True, kw_only=True)
class JobLine(AttemptFields):
    """One attempt of a job, with the values that a list of jobs shows. Times are in seconds since the epoch; a time is
    None until the event has happened.

    Attributes:
        queued_at: Time at which the attempt joined the queue.
        admitted_at: Time at which the attempt left the queue.
        dismissed_at: Time at which a user has dismissed the failure of the attempt from the page.
    """

    queued_at: float | None
    admitted_at: float | None
    dismissed_at: float | None

    @property
    def key(self) -> Key:
        """Return the key of the attempt, which is the job's id and the number of the attempt."""
        return Key(self.job_id, self.attempt)


_COLUMNS = (Job.id.label("job_id"), *(getattr(Job, each.name) for each in fields(JobLine) if hasattr(Job, each.name)))

_CHANGED_AT = (Job.created_at, Job.ended_at, Job.dismissed_at)


def job_lines(store: Store, *, changed_since: float | None = None) -> list[JobLine]:
    """Return attempts of jobs, the newest first, at most 20,000. The large columns (spec, result) are not read."""
    query = select(*_COLUMNS).order_by(Job.created_at.desc(), Job.id, Job.attempt.desc()).limit(MOST_LINES)
    if changed_since is not None:
        query = query.where(or_(Job.state.not_in(JOB_ENDED), *(each > changed_since for each in _CHANGED_AT)))
    rows = store.rows(query)
    waits = any(row.state is JobState.PENDING for row in rows)
    places = job_queue.places(store) if waits else {}
    found = []
    for row in rows:
        place = places.get(Key(row.job_id, row.attempt))
        converted = {
            "error": row.error and redact(row.error),
            "progress": None if row.progress is None else Progress.of(row.progress),
            "position": None if place is None else place.position,
        }
        found.append(JobLine(**row._asdict() | converted))
    return found


@dataclass(frozen=True)
class StoreMark:
    """Mark to detect changes of the store. If pools, nodes, leases, operations or jobs change, the mark changes.

    Attributes:
        text: Text to compare with the text of another mark; the text has no other meaning.
        jobs: Number of attempts in the store.
    """

    text: str
    jobs: int


def store_mark(store: Store) -> StoreMark:
    """Return the mark of the store's present contents, with one SELECT that reads no large column.

    The renewal of a lease and the time of a pool's last use do not change the mark.
    """
    query = select(
        _joined(Pool.name, Pool.state, Pool.min_nodes, Pool.max_nodes, Pool.epoch, Pool.start_failures),
        _joined(Demand.pool, Demand.size),
        _joined(Node.id, Node.state, Node.busy, func.length(Node.error)),
        _joined(Lease.id, Lease.size, Lease.waiting),
        _counts_and_maxima(Operation.created_at, Operation.ended_at),
        _counts_and_maxima(Action.id),
        _counts_and_maxima(Promotion.created_at, Promotion.confirmed_at),
        _counts_and_maxima(
            Job.created_at, Job.queued_at, Job.admitted_at, Job.started_at, Job.heartbeat_at, Job.ended_at
        ),
        select(func.count()).select_from(Job).scalar_subquery(),
    )
    [[*texts, jobs]] = store.rows(query)
    return StoreMark(repr(texts), jobs)


def _joined(*columns: Any) -> ScalarSelect[str]:
    """Return a subquery that joins the values of the given columns, from all rows of their table, into one text."""
    return select(func.aggregate_strings(_joined_text(columns), ",")).scalar_subquery()


def _counts_and_maxima(*columns: Any) -> ScalarSelect[str]:
    """Return a subquery that joins, into one text, the number of values and the maximum of each given column."""
    return select(
        _joined_text([part for column in columns for part in (func.count(column), func.max(column))])
    ).scalar_subquery()


def _joined_text(values: Sequence[Any]) -> ColumnElement[str]:
    """Return an SQL expression that joins the given expressions to one text, with ":" between them."""
    texts = (func.coalesce(cast(value, String), "") for value in values)
    return reduce(lambda text, following: text + ":" + following, texts)


@dataclass(frozen=True, kw_only=True)
class JobStatus(AttemptFields):
    """Status of one attempt of a job; times are seconds since the epoch.

    Attributes:
        job_id: Id of the job.
        attempt: Number of the attempt, from 1.
        pool: Name of the pool that the attempt runs on.
        holder: Name of the run that submitted the job.
        task_key: Name of the workflow engine's task that submitted the job, unique among the tasks of the holder; None
            if no task has submitted it.
        task_name: Name of the flow and of its task that submitted the job; None if no task of a flow has submitted it.
        label: What the job is about: the name of its model or function, and of its MLflow run.
        team: Team to which the job belongs; None if it belongs to no team.
        state: State of the attempt, see `shoal.state.schema.JobState`.
        error: Reason why the attempt failed or was cancelled; None for any other attempt.
        result: Result of the attempt once it has succeeded.
        mlflow_run_id: Id of the attempt's MLflow run; None before that run has started.
        created_at: Time of the submission.
        started_at: Time when the driver began.
        ended_at: Time when the attempt ended.
        progress: Latest progress of the training that the driver has recorded, at most some seconds old while the
            attempt runs; None if no progress has been recorded yet.
        priority: Priority in the pool's queue.
        position: Place in the pool's queue, 1 for the attempt that starts next; None if the attempt does not wait.
        node_seconds: Number of nodes that the attempt has used up to now, multiplied by the seconds; None before it has
            started.
    """

    result: JobResult | None
    node_seconds: float | None = None

    @classmethod
    def of(cls, job: Job, place: Place | None = None, node_seconds: float | None = None) -> JobStatus:
        """Build the status from the attempt's row, its place in the queue, and its node-seconds so far."""
        same = {each.name: getattr(job, each.name) for each in fields(cls) if hasattr(Job, each.name)}
        converted = {
            "result": JobResult.model_validate(job.result) if job.result else None,
            "progress": progress_of(job),
            "position": place.position if place and is_waiting(job) else None,
        }
        return cls(job_id=job.id, node_seconds=node_seconds, **same | converted)


def progress_of(job: Job) -> Progress | None:
    """Return the latest progress that an attempt's row has."""
    return None if job.progress is None else Progress.of(job.progress)
