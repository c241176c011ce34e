"""Find the job of an earlier try of a workflow engine's task, and take it over."""

from __future__ import annotations

from collections.abc import Callable

from shoal.jobs.credentials import Secrets
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.stages import Stage, stage_of
from shoal.jobs.journal.tasks import TaskTry, jobs_of
from shoal.jobs.reconcile import ending, rounds
from shoal.jobs.reconcile.decide import End
from shoal.jobs.reconcile.sending import Supplies
from shoal.jobs.reconcile.target import Target
from shoal.state import Store
from shoal.state.schema import JOB_ENDED, Job, JobState


def take_over(
    store: Store,
    holder: str,
    task: TaskTry,
    fingerprint: str | None,
    target_of: Callable[[Key], Target],
    secrets_of: Callable[[], Secrets],
    *,
    detach: bool,
) -> JobHandle | None:
    """Return a handle of the job of an earlier try of the task, if this try takes over that job; otherwise None.

    Unfinished jobs that this try does not take over are ended, so that a task never has two jobs at a time.

    Raises:
        JobError: A newer try of the task has an unfinished job.
    """
    found: JobHandle | None = None
    for job in jobs_of(store, holder, task):
        target = target_of(Key(job.id, job.attempt))
        if job.state not in JOB_ENDED and task.is_older_than(job):
            raise task.superseded_by(job)
        if found is not None or not task.takes_over(job):
            _leave(target, job, task)
        elif stage_of(job) is Stage.UNQUEUED:
            _leave_unqueued(target, job, fingerprint)
        else:
            found = _joined(target, job, task, secrets_of, detach=detach)
    return found


def _leave(target: Target, job: Job, task: TaskTry) -> None:
    """End a job that this try does not take over, or mark its result as returned, so that no later submission gets
    it."""
    if job.state in JOB_ENDED:
        attempts.collect(target.store, target.key, target.clock())
    else:
        ending.cancel(target, job, f"try {task.number} of the task does not use the job of an earlier try")


def _leave_unqueued(target: Target, job: Job, fingerprint: str | None) -> None:
    """End a job that its submitter has not put into the queue yet, unless its spec is the spec of this try.

    This try does not take over such a job, because only the submitter has the job's credentials.
    """
    why = "another try of the task submits the task's job with another spec"
    is_other = job.spec["fingerprint"] != fingerprint
    if is_other and not ending.record(target, job, End(JobState.CANCELLED, why)):
        ending.cancel(target, job, why)  # a driver has started the job meanwhile, so the job is running


def _joined(
    target: Target, job: Job, task: TaskTry, secrets_of: Callable[[], Secrets], *, detach: bool
) -> JobHandle | None:
    """Attach this try to the job; return None if the job has failed or was cancelled."""
    is_ended = job.state in JOB_ENDED
    joined = job if is_ended else attempts.join(target.store, target.key, target.clock(), task, detach=detach)
    if joined is None:
        # The job has ended since its row was read. If the job has succeeded, its result is in the row.
        joined = attempts.load(target.store, target.key)
    supplies = Supplies()
    if joined.state not in JOB_ENDED:
        is_needed = joined.state is JobState.PENDING and joined.needs_credentials
        supplies = Supplies(secrets_of() if is_needed else None)
        joined = rounds.Waiter(target, supplies).round()
    return None if joined.state in (JobState.FAILED, JobState.CANCELLED) else JobHandle(target, joined, supplies)
