"""Read and change the rows of jobs in the store. Each attempt of a job has one row.

The state of an attempt goes from pending to running, and then to succeeded, failed or cancelled. Every change first
checks the present state in the same transaction. Therefore a decision that was made on old data changes nothing, and
the first recorded end is never replaced by another one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy import BigInteger, bindparam, case, func, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, defer

from shoal import errors, history, telemetry
from shoal.jobs import ids
from shoal.jobs.journal import owners
from shoal.jobs.journal.owners import EngineTask
from shoal.jobs.journal.stages import Event, may
from shoal.jobs.journal.steps import JobStep, transaction
from shoal.os_processes import ProcessId
from shoal.pool.holder import may_change, python_holder, require_team, run_of
from shoal.pool.journal import usage
from shoal.pool.journal.usage import SPENT_ADVICE, end_job
from shoal.secrets.redaction import redact
from shoal.state import Store, stamps
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, ActionKind, Base, Job, JobState

if TYPE_CHECKING:
    from shoal.jobs.results import JobResult

Choice = TypeVar("Choice", bool, dict[str, Any])


@dataclass(frozen=True)
class Order:
    """Values that the submitter of a job has chosen, and that are written into the row of a new attempt."""

    job_id: str
    pool: str
    holder: str
    spec: dict[str, Any]
    """Spec of the job as JSON, without credentials. An equal `fingerprint` in it shows the same job."""
    endpoint: dict[str, str]
    orphan_after: float | None
    priority: int = 0
    gang: dict[str, Any] = field(default_factory=dict)
    """The group of workers that the job asks for, as plain data; see `shoal.training.demand.GangClaim`."""
    task: EngineTask | None = None
    """The try of a workflow engine's task that submits the job."""
    label: str | None = None
    """What the job is about, for lists of jobs."""
    team: str | None = None
    """The team to which the job belongs."""
    needs_credentials: bool = False
    """Whether the driver waits until a process has written encrypted credentials into the row."""

    def is_for(self, job: Job) -> bool:
        """Return whether a job that was submitted before, under the same id, is the job of this order."""
        differs = self.task is not None and self.task.differs_from(job)
        return bool(job.spec["fingerprint"] == self.spec["fingerprint"]) and not differs


@dataclass(frozen=True)
class Key:
    """Id of a job and number of an attempt, which together identify the attempt."""

    job_id: str
    attempt: int

    @property
    def submission_id(self) -> str:
        """Return the id under which the attempt is submitted to Ray; Ray accepts each id only once."""
        return self.folder.replace("/", "-")

    @property
    def folder(self) -> str:
        """Return the relative path of the folder with the attempt's files."""
        if self.problem:
            raise errors.JobError(self.problem)
        return f"{self.job_id}/{self.attempt}"

    @property
    def problem(self) -> str | None:
        """Return the reason why nothing is done with a row that has this key, and what to do; None if there is none."""
        if ids.is_legal(self.job_id) and self.attempt > 0:
            return None
        return (
            f"the store has attempt {self.attempt} of a job with the id {errors.shown(self.job_id)}, which no "
            "submission has made: nothing is done with it; delete its row from the table jobs"
        )


def ask(store: Store, order: Order, now: float, refusal: errors.ShoalError | None = None) -> Job:
    """Return the row of an attempt for a submission: an existing attempt of the same job, or else a new one.

    The job's newest attempt is returned if `Order.is_for` accepts it, and it is pending or running, or has succeeded
    and its result has not been returned to a caller yet. In all other cases this function adds a row for a new attempt,
    and the caller has to send that attempt to the pool's head.

    If the order has no `orphan_after`, the `orphan_after` of a pending or running attempt is removed, so that the
    attempt goes on even if no process polls it.

    Raises:
        JobBusyError: The newest attempt is pending or running, and has another fingerprint; or `refusal`.
        TeamError: The job belongs to another team.
        JobError: The newest attempt belongs to another try or run of the task (`EngineTask.check`).
    """
    while True:
        newest = find_latest(store, order.job_id)
        if newest is not None and (newest.holder != order.holder or ids.is_interactive(order.holder)):
            require_team(newest.team, order.team, f'job "{order.job_id}"')
        if newest is not None and order.task is not None:
            order.task.check(newest)
        same = newest is not None and order.is_for(newest)
        if newest is not None and newest.state not in JOB_ENDED:
            if not same:
                raise errors.JobBusyError(
                    f'job "{order.job_id}" is {newest.state.value} with another spec: wait until it has ended, cancel '
                    f"it with `shoal jobs cancel {order.job_id}`, or choose another job_id"
                )
            found = join(store, Key(newest.id, newest.attempt), now, order.task, detach=order.orphan_after is None)
        elif newest is not None and same and newest.state is JobState.SUCCEEDED and newest.collected_at is None:
            found = newest
        elif refusal is not None:
            raise refusal
        else:
            kept = _kept(newest, order) if newest and same else {}
            found = _add(store, order, newest.attempt + 1 if newest else 1, kept, now)
            if found is not None:
                telemetry.job_submitted(found.pool, found.framework)
        if found is not None:
            return found


def join(store: Store, key: Key, now: float, task: EngineTask | None = None, *, detach: bool = False) -> Job | None:
    """Record that a process has attached to a pending or running attempt, or that a task takes the result of an attempt
    that has succeeded. Return the attempt's row, or None if the attempt has ended otherwise.
    """
    with transaction(store, JobStep.ASK) as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or (job.state in JOB_ENDED and not (task and job.state is JobState.SUCCEEDED)):
            return None
        if task is not None:
            task.check(job)
            # `log_shown` is None, so that the new try's log in the workflow engine shows all lines of the job's log.
            job.log_shown = None
            for name, value in task.columns().items():
                setattr(job, name, value)
        if job.state in JOB_ENDED:
            return job
        note_polled(job, now)
        if detach:
            job.orphan_after = None
        job.submitter = {**job.submitter, "submissions": submissions(job) + 1}
        return job


def _add(store: Store, order: Order, attempt: int, kept: dict[str, Any], now: float) -> Job | None:
    """Add the row of a new attempt, and return the row; return None if another process has added the same attempt
    first.

    The INSERT is the transaction's only statement, so that other writers wait for a short time only. The primary key
    ensures that two processes do not add the same attempt.
    """
    same = {each.name: getattr(order, each.name) for each in fields(order) if hasattr(Job, each.name)}
    changed = {"gang": _gang(order.gang, kept.get("uses_gpu")), **kept}
    job = Job(
        id=order.job_id,
        attempt=attempt,
        state=JobState.PENDING,
        last_polled_at=now,
        last_polled_clock=stamps.stamp(now),
        submitter=ProcessId.mine().to_json() | {"python": sys.executable, "folder": _folder()},
        created_at=now,
        **same | changed | (order.task.columns() if order.task else {}),
    )
    try:
        with transaction(store, JobStep.ASK) as session:
            session.add(job)
    except errors.StoreError as error:
        if isinstance(error.__cause__, IntegrityError) and state(store, Key(order.job_id, attempt)) is not None:
            return None
        raise
    return job


def find_latest(store: Store, job_id: str) -> Job | None:
    """Return the row of a job's newest attempt; None if there is no such job."""
    return store.scalar(select(Job).where(Job.id == job_id).order_by(Job.attempt.desc()).limit(1))


def latest(store: Store, job_id: str) -> Job:
    """Return the row of a job's newest attempt."""
    if (job := find_latest(store, job_id)) is None:
        raise errors.JobNotFoundError(f'job "{job_id}" does not exist: `shoal jobs list` shows all jobs')
    return job


def load(store: Store, key: Key) -> Job:
    """Return the row of an attempt."""
    with store.reading(snapshot=False) as session:
        return get(session, key, lock=False)


def digest_of_results(store: Store, key: Key) -> str | None:
    """Return the digest of the file with the return values of an attempt, which may be unpickled if it has this digest.

    Raises:
        JobError: There is no such attempt, or it is no retry of the job's first attempt: it belongs to a team that may
            not change the job, or, for an id that is not in the spec, to another run or user.
    """
    with store.reading() as session:
        job, first = get(session, key, lock=False), get(session, Key(key.job_id, 1), lock=False)
    is_chosen = bool(first.run_config.get("job_id"))
    is_retry = is_chosen or _owner(job.holder) == _owner(first.holder)
    if not (is_retry and may_change(first.team, job.team)):
        raise errors.JobError(
            f'attempt {key.attempt} of job "{key.job_id}" belongs to {job.holder} and is no retry of the first attempt '
            f"of {first.holder}: its results are not read, because they could run any code; submit the job again"
        )
    return job.results_digest


def _owner(holder: str) -> str:
    """Return the run of a workflow engine that has submitted a job, or the user."""
    return holder.partition(":")[2].partition("@")[0] if ids.is_interactive(holder) else run_of(holder)


def is_current(store: Store, key: Key) -> bool:
    """Return whether an attempt is running and is the newest of its job."""
    query = select(Job.attempt, Job.state).where(Job.id == key.job_id).order_by(Job.attempt.desc()).limit(1)
    return store.rows(query) == [(key.attempt, JobState.RUNNING)]


def state(store: Store, key: Key) -> JobState | None:
    """Return the state of an attempt; None if the store has no such attempt."""
    return store.scalar(select(Job.state).where(Job.id == key.job_id, Job.attempt == key.attempt))


def first_asked(store: Store, job_id: str) -> float | None:
    """Return the time (seconds since the epoch) when a job's first attempt was submitted; None if there is no such job.

    The time distinguishes two jobs that have the same id in two stores.
    """
    return store.scalar(select(func.min(Job.created_at)).where(Job.id == job_id))


def newest(store: Store, *, pool: str | None, states: Collection[JobState], limit: int) -> list[Job]:
    """Return the rows of attempts, the newest first; the column `spec` is not read, because specs are large."""
    query = select(Job).order_by(Job.created_at.desc()).limit(limit).options(defer(Job.spec))
    if pool is not None:
        query = query.where(Job.pool == pool)
    if states:
        query = query.where(Job.state.in_(states))
    return list(store.scalars(query))


def least_recently_polled(store: Store, state: JobState, limit: int) -> list[Key]:
    """Return the attempts in a given state, ordered by the time of their last poll, the earliest time first."""
    query = select(Job.id, Job.attempt).where(Job.state == state).order_by(Job.last_polled_at, Job.id).limit(limit)
    return [Key(job_id, attempt) for job_id, attempt in store.rows(query)]


def touch(store: Store, key: Key, now: float) -> Job:
    """Update the `last_polled_at` of an attempt, and return its row.

    A job ends itself if `last_polled_at` is not updated for `orphan_after` seconds.
    """
    with transaction(store, JobStep.TOUCH) as session:
        job = get(session, key)
        note_polled(job, now)
        return job


@dataclass(frozen=True)
class Mark:
    """Values that a process that waits for many jobs writes into the row of one attempt (see `touch_all`)."""

    key: Key
    log_shown: int
    """Position in the job's log up to which the log was shown to the user."""
    task_try: int
    """Number of the task's try that waits. If a newer try has attached, `log_shown` is not changed."""


def touch_all(store: Store, marks: Collection[Mark], now: float) -> None:
    """Update the `last_polled_at` and `log_shown` of several attempts that have not ended."""
    table = Base.metadata.tables[Job.__tablename__]
    row = table.c
    shown = case((row.task_try == bindparam("of_try"), bindparam("shown", type_=BigInteger)), else_=row.log_shown)
    polled = (
        update(table)
        .where(row.id == bindparam("of_id"), row.attempt == bindparam("of_attempt"), row.ended_at.is_(None))
        .values({row.last_polled_at: now, row.last_polled_clock: stamps.stamp(now), row.log_shown: shown})
    )
    values = [
        {"of_id": one.key.job_id, "of_attempt": one.key.attempt, "of_try": one.task_try, "shown": one.log_shown}
        for one in marks
    ]
    with transaction(store, JobStep.TOUCH) as session:
        # SQLAlchemy's ORM session cannot execute an UPDATE with a WHERE clause for a list of values, but its connection
        # can.
        session.connection().execute(polled, values)


_LARGE = (Job.spec, Job.gang, Job.result, Job.error, Job.progress, Job.sealed_credentials)
"""The columns of a job's row that a process does not read if it waits for many jobs."""

_MOST_KEYS = 400
"""Largest number of attempts that one query reads. SQLite limits the number of values in a query."""


def look_at(store: Store, keys: Collection[Key]) -> dict[Key, Job]:
    """Return the rows of several attempts, without the large columns (`_LARGE`). Attempts without a row are left
    out."""
    found: dict[Key, Job] = {}
    with store.reading(snapshot=False) as session:
        for pairs in _in_parts(keys):
            query = select(Job).where(tuple_(Job.id, Job.attempt).in_(pairs)).options(*map(defer, _LARGE))
            found |= {Key(job.id, job.attempt): job for job in session.scalars(query)}
    return found


def start(store: Store, key: Key, driver: dict[str, Any], now: float) -> Job | None:
    """Record that a pending attempt is running now, and return its row. The attempt's driver calls this function.

    Returns:
        The row; None if the attempt is not pending any more, so that the driver must exit.
    """
    with transaction(store, JobStep.START) as session:
        job = session.get(Job, (key.job_id, key.attempt), with_for_update=True)
        if job is None or not may(job, Event.START):
            return None
        job.state, job.driver, job.started_at = JobState.RUNNING, driver, now
        job.driver_key = job.sealed_credentials = None
        usage.job_uses(session, job, 1, now)
        return job


def note_run(store: Store, key: Key, run_id: str) -> None:
    """Record the id of an attempt's MLflow run in the attempt's row."""
    with transaction(store, JobStep.NOTE_RUN) as session:
        get(session, key).mlflow_run_id = run_id


def note_saved(store: Store, key: Key, digest: str) -> None:
    """Record the digest of the files in which an attempt has saved its training."""
    with transaction(store, JobStep.NOTE_SAVED) as session:
        get(session, key).results_digest = digest


def saved_before_failure(store: Store, key: Key) -> tuple[Key, str] | None:
    """Return the newest earlier attempt of a job that has saved its training and failed later, and the digest of its
    files; None if there is none, or if an attempt after it has succeeded or was cancelled."""
    query = select(Job.attempt, Job.state, Job.results_digest).where(Job.id == key.job_id, Job.attempt < key.attempt)
    for attempt, state, digest in store.rows(query.order_by(Job.attempt.desc())):
        if state is not JobState.FAILED:
            return None
        if digest is not None:
            return Key(key.job_id, attempt), digest
    return None


def without_success(store: Store, key: Key, *, same_spec: bool = False) -> list[Key]:
    """Return the earlier attempts of a job that have failed or were cancelled, the newest first; with `same_spec` only
    those with the attempt's spec, because the caller may have chosen the job id."""
    query = select(Job.attempt).where(Job.id == key.job_id, Job.attempt < key.attempt)
    query = query.where(Job.state.in_((JobState.FAILED, JobState.CANCELLED))).order_by(Job.attempt.desc())
    with store.reading() as session:
        if same_spec:
            mine = get(session, key, lock=False).spec["fingerprint"]
            query = query.where(Job.spec["fingerprint"].as_string() == mine)
        return [Key(key.job_id, attempt) for attempt in session.scalars(query)]


KEPT = ("uses_gpu", "versions")
"""Columns with what the first attempt of a job has chosen, and its retries use: models that were trained on GPUs and on
CPUs, or on other rows, differ."""


def keep_choice(store: Store, key: Key, name: Literal["uses_gpu", "versions"], choice: Choice) -> Choice:
    """Record a choice of a job, unless an earlier attempt has recorded it, and return the recorded choice.

    Args:
        store: The store.
        key: The attempt.
        name: Column of the choice, one of `KEPT`.
        choice: The choice, if there is none yet. Of a dict, the keys that are not recorded yet are added.
    """
    with transaction(store, JobStep.NOTE_CHOICE) as session:
        job = get(session, key)
        recorded = getattr(job, name)
        if isinstance(choice, dict):
            setattr(job, name, {**choice, **(recorded or {})})
        elif recorded is None:
            setattr(job, name, choice)
        job.gang = _gang(job.gang, job.uses_gpu)
        kept: Choice = getattr(job, name)
        return kept


def _kept(newest: Job, order: Order) -> dict[str, Any]:
    """Return the choices of a job's newest attempt that another attempt with the same spec keeps.

    Only a retry reads the versions of tables that the failed attempt has read. After a success, or an error that only
    other rows may remove, the newest versions are read.
    """
    has_failed = newest.state is not JobState.SUCCEEDED and not newest.error_is_permanent
    is_retry = has_failed and newest.holder == order.holder
    return {name: getattr(newest, name) for name in KEPT if name != "versions" or is_retry}


def _gang(gang: dict[str, Any], uses_gpu: bool | None) -> dict[str, Any]:
    """Set the number of GPUs per worker in a job's group of workers. If `uses_gpu` is None, change nothing.

    Without this number, a job that uses no GPUs could wait in the queue until GPUs are free.
    """
    return gang if uses_gpu is None else gang | {"gpus": int(uses_gpu)}


@dataclass(frozen=True)
class End:
    """End of an attempt: its final state, and the data that are written into its row with it.

    Attributes:
        state: Final state of the attempt.
        error: Reason why the attempt failed or was cancelled.
        error_is_permanent: Whether a further attempt would fail in the same way; None if the attempt did not fail.
        result: Result of an attempt that has succeeded, or that has failed because too many of its parts have failed.
        results_digest: SHA-256 of the file with a training function's return values.
    """

    state: JobState
    error: str | None = None
    error_is_permanent: bool | None = None
    result: JobResult | None = None
    results_digest: str | None = None


def end(
    store: Store,
    key: Key,
    state: JobState,
    now: float,
    *,
    seen: Collection[JobState] = JOB_ACTIVE,
    most_submissions: int | None = None,
    error: str | None = None,
    error_is_permanent: bool | None = None,
    result: dict[str, Any] | None = None,
    results_digest: str | None = None,
    progress: dict[str, Any] | None = None,
    actor: str | None = None,
    within: Callable[[Session, Job], None] | None = None,
) -> bool:
    """Record the end of an attempt if its present state is one of the given states.

    `within` is called in the same transaction, in any state.
    """
    assert state in JOB_ENDED
    error = error and redact(error)
    with transaction(store, JobStep.END) as session:
        job = get(session, key)
        if within:
            within(session, job)
        if job.state not in seen or not may(job, Event.END):
            return False
        if most_submissions is not None and submissions(job) > most_submissions:
            return False
        end_job(session, job, state, now, error=error, error_is_permanent=error_is_permanent)
        # Without a new digest, that of a saved training stays.
        job.result, job.results_digest = result, results_digest or job.results_digest
        job.progress = progress or job.progress
        if state is JobState.CANCELLED:
            history.record(
                session, ActionKind.CANCELLED, job.id, holder=actor or python_holder(), at=now, pool=job.pool,
                detail=f"attempt {job.attempt}" + (f": {error}" if error else ""),
            )  # fmt: skip
    seconds = dict((result or {}).get("times") or {})
    seconds.pop("queue", None)  # the driver has reported the seconds in the queue to telemetry when it started
    telemetry.job_ended(job.pool, job.framework, state.value, {k: v for k, v in seconds.items() if v is not None})
    return True


def node_seconds(store: Store, keys: Collection[Key], now: float) -> dict[Key, float]:
    """Return the node-seconds that attempts have used up to now: the number of their nodes multiplied by the time.

    The result does not contain attempts that have not started.
    """
    found: dict[tuple[str, int], float] = {}
    with store.reading(snapshot=False) as session:
        for pairs in _in_parts(keys):
            found |= usage.of_attempts(session, pairs, now)
    return {Key(*attempt): value for attempt, value in found.items()}


def budget_spent(used: float, budget: float) -> str:
    """Return the error of a job that has used up its budget of node-hours."""
    return f"the job has used {used:.4g} node-hours, but run_config.budget_node_hours={budget:g}: {SPENT_ADVICE}"


def check_budget(store: Store, job_id: str, budget_node_hours: float | None, now: float) -> None:
    """Refuse a further attempt of a job that has used up its budget."""
    if budget_node_hours is None:
        return
    with store.reading() as session:
        used = usage.of_job(session, job_id, now) / 3600
    if used >= budget_node_hours:
        raise errors.BudgetError(budget_spent(used, budget_node_hours))


def collect(store: Store, key: Key, now: float) -> None:
    """Record that the result of an attempt was returned to a caller. The next submission then creates a new attempt."""
    with transaction(store, JobStep.COLLECT) as session:
        job = get(session, key)
        job.collected_at = job.collected_at or now


def give_up(store: Store, key: Key, now: float) -> None:
    """Record that no later submission, and no later try of the task, gets the result of an attempt."""
    with transaction(store, JobStep.COLLECT) as session:
        job = get(session, key)
        job.collected_at, job.task_run = job.collected_at or now, None


def dismiss(store: Store, key: Key, now: float) -> None:
    """Record that a user has dismissed the failure of an attempt: the page no longer shows that it needs attention.

    Raises:
        InvalidArgumentError: The attempt has not failed.
        TeamError: The job belongs to another team.
    """
    with transaction(store, JobStep.COLLECT) as session:
        job = get(session, key)
        owners.require(job, None)
        if job.state is not JobState.FAILED:
            raise errors.InvalidArgumentError(
                f'attempt {key.attempt} of job "{key.job_id}" is {job.state.value}: only a failure can be dismissed'
            )
        job.dismissed_at, said = now, f"attempt {job.attempt}"
        history.record(
            session, ActionKind.DISMISSED, job.id, holder=python_holder(), at=now, pool=job.pool, detail=said
        )


def submissions(job: Job) -> int:
    """Return how often an attempt was submitted: once by the process that created it, and once by each process that
    attached to it.

    If a task finds a higher number than the one that it has stored, a newer try of the task has attached to the job.
    """
    return int(job.submitter.get("submissions", 1))


def note_polled(job: Job, now: float) -> None:
    """Set an attempt's `last_polled_at` to the given time, inside the caller's transaction."""
    job.last_polled_at, job.last_polled_clock = now, stamps.stamp(now)


def _in_parts(keys: Collection[Key]) -> Iterator[list[tuple[str, int]]]:
    """Yield lists of attempts, as pairs of job id and number; each list is as long as one query allows."""
    pairs = [(key.job_id, key.attempt) for key in keys]
    for first in range(0, len(pairs), _MOST_KEYS):
        yield pairs[first : first + _MOST_KEYS]


def get(session: Session, key: Key, *, lock: bool = True) -> Job:
    """Return the row of an attempt, inside the caller's transaction."""
    if (job := session.get(Job, (key.job_id, key.attempt), with_for_update=lock)) is None:
        raise errors.JobError(
            f'attempt {key.attempt} of job "{key.job_id}" does not exist: `shoal jobs list` shows all jobs'
        )
    return job


def _folder() -> str | None:
    """Return the working folder of this process; None if the folder was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
