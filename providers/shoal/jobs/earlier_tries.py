"""Find the job that an earlier try of a workflow engine's task has submitted, and take over the job or its result."""

from __future__ import annotations

from shoal.jobs import credentials
from shoal.jobs.call import Call
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.stages import Stage, stage_of
from shoal.jobs.journal.tasks import TaskTry, jobs_of
from shoal.jobs.reconcile import ending, rounds
from shoal.jobs.reconcile.decide import End
from shoal.jobs.reconcile.sending import Supplies
from shoal.jobs.reconcile.target import Target
from shoal.jobs.specs.function import AnyJobSpec
from shoal.state.schema import JOB_ENDED, Job, JobState


def taken_over(call: Call, task: TaskTry, spec: AnyJobSpec) -> JobHandle | None:
    """Return a handle of the job of an earlier try of the task, if this try takes over that job; otherwise None.

    This try takes over the newest job that is unfinished or has succeeded, unless a user has cleared the task since
    then, or the job has another function or other arguments. It does not matter whether a caller already got the result
    of the job, because the engine may not have stored it. The other unfinished jobs are ended, so that a task never has
    two jobs at a time.

    Raises:
        JobError: A newer try of the task has an unfinished job.
        InvalidArgumentError: This try has an unfinished job with another function or other arguments.
    """
    found: JobHandle | None = None
    for job in jobs_of(call.store, call.holder, task):
        task.check(job)
        target = call.target(Key(job.id, job.attempt))
        is_taken_over = task.durable and (job.task_try or 0) > task.cleared and not task.differs_from(job)
        if found is not None or not is_taken_over:
            _leave(target, job, task)
        elif stage_of(job) is Stage.UNQUEUED:
            _leave_unqueued(target, job, spec.fingerprint)
        else:
            found = _joined(call, target, job, task, spec)
    return found


def _leave(target: Target, job: Job, task: TaskTry) -> None:
    """End a job that this try does not take over, or mark its result as returned, so that no later submission gets
    it."""
    if job.state not in JOB_ENDED:
        ending.cancel(target, job, f"try {task.number} of the task does not use the job of an earlier try")
    elif job.collected_at is None:
        attempts.collect(target.store, target.key, target.clock())


def _leave_unqueued(target: Target, job: Job, fingerprint: str | None) -> None:
    """End a job that its submitter has not put into the queue yet, unless its spec is the spec of this try.

    This try does not take over such a job, because only the submitter has the job's credentials.
    """
    why = "another try of the task submits the task's job with another spec"
    is_other = job.spec["fingerprint"] != fingerprint
    if is_other and not ending.record(target, job, End(JobState.CANCELLED, why)):
        ending.cancel(target, job, why)  # a driver has started the job meanwhile, so the job is running


def _joined(call: Call, target: Target, job: Job, task: TaskTry, spec: AnyJobSpec) -> JobHandle | None:
    """Attach this try to the job; return None if the job has failed or was cancelled."""
    joined: Job | None = job
    if job.state not in JOB_ENDED:
        joined = attempts.join(call.store, target.key, call.clock(), task, detach=call.orphan_after is None)
    if joined is None:
        # The job has ended since its row was read. If the job has succeeded, its result is in the row.
        joined = attempts.load(call.store, target.key)
    supplies = Supplies()
    if joined.state not in JOB_ENDED:
        if joined.state is JobState.PENDING and joined.needs_credentials:
            supplies.secrets = call.secrets(spec, credentials.hide(spec.document())[1])
        joined = rounds.Waiter(target, supplies).round()
    return None if joined.state in (JobState.FAILED, JobState.CANCELLED) else JobHandle(target, joined, supplies)
