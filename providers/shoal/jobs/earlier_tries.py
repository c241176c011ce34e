"""Find the job that an earlier try of a workflow engine's task has submitted, and take over the job or its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from shoal.jobs import credentials, ids
from shoal.jobs.call import Call
from shoal.jobs.files import artifacts
from shoal.jobs.handle import JobHandle
from shoal.jobs.journal import attempts
from shoal.jobs.journal.stages import Stage, stage_of
from shoal.jobs.journal.tasks import EngineTask, FlowTask, TaskTry, jobs_of
from shoal.jobs.reconcile import ending, rounds
from shoal.jobs.reconcile.decide import End
from shoal.jobs.reconcile.sending import Supplies
from shoal.jobs.reconcile.target import Target
from shoal.jobs.results import JobResult
from shoal.jobs.specs.base import AnyJobSpec
from shoal.state.schema import JOB_ENDED, Job, JobState


def calls(call: Call, spec: AnyJobSpec) -> Iterator[Call]:
    """Yield the call with each job id that its task may use, in this order.

    Equal task runs of a flow run have the ids of the first job, of the second job, and so on. The task run uses the
    first one that no other task run of the same try uses. If the caller has chosen the job id, equal task runs share
    the job.
    """
    task, chosen = call.task, spec.run_config.job_id
    if not isinstance(task, FlowTask):
        yield call
    elif chosen is not None:
        yield replace(call, task=replace(task, run=chosen))
    else:
        for number in count(1):
            place = f"{task.digest} {number}"
            yield replace(call, job_id=ids.job_id(spec.framework, task.key, str(spec.fingerprint), place))


def taken_over(call: Call, task: EngineTask, spec: AnyJobSpec) -> JobHandle | None:
    """Return a handle of the job of an earlier try of the task, if this try takes over that job; otherwise None.

    This try takes over the newest job that is unfinished or has succeeded, unless a user wants a new one, or the
    function or the arguments have changed, or the files of the result are gone. It does not matter whether a caller
    already got the result of the job, because the engine may not have stored it. The other unfinished jobs are ended,
    so that a task never has two jobs at a time.

    Raises:
        JobError: The job belongs to another try or run of the task (`EngineTask.check`).
    """
    found: JobHandle | None = None
    for job in _jobs(call, task, spec):
        task.check(job)
        target = call.target(job)
        if found is not None or not task.takes_over(job) or not _has_files(job, spec):
            _leave(target, job)
        elif stage_of(job) is Stage.UNQUEUED:
            _leave_unqueued(target, job, spec.fingerprint)
        else:
            found = _joined(call, target, task, spec)
    return found


def _jobs(call: Call, task: EngineTask, spec: AnyJobSpec) -> list[Job]:
    """Return the rows of attempts that this and earlier tries of the task have submitted, the newest first."""
    if isinstance(task, TaskTry):
        return jobs_of(call.store, call.holder, task)
    newest = attempts.find_latest(call.store, call.job_id)
    # If the caller has chosen the job id, the job may belong to another flow run, or have another spec.
    is_equal = newest and newest.task_key == task.key and newest.spec["fingerprint"] == spec.fingerprint
    return [newest] if newest and is_equal else []


def _has_files(job: Job, spec: AnyJobSpec) -> bool:
    """Return whether the result's files still exist, if the job has succeeded."""
    if job.state is not JobState.SUCCEEDED:
        return True
    return artifacts.exist(JobResult.model_validate(job.result), spec.run_config.artifact_location)


def _leave(target: Target, job: Job) -> None:
    """End a job that this try does not take over, or mark its result as returned, so that no later submission gets
    it."""
    if job.state not in JOB_ENDED:
        ending.cancel(target, job, "a later try of the task does not use the job")
    elif job.state is JobState.SUCCEEDED and job.collected_at is None:
        attempts.collect(target.store, target.key, target.clock())


def _leave_unqueued(target: Target, job: Job, fingerprint: str | None) -> None:
    """End a job that its submitter has not put into the queue yet, unless its spec is the spec of this try.

    This try does not take over such a job, because only the submitter has the job's credentials.
    """
    why = "another try of the task submits the task's job with another spec"
    is_other = job.spec["fingerprint"] != fingerprint
    if is_other and not ending.record(target, job, End(JobState.CANCELLED, why)):
        ending.cancel(target, job, why)  # a driver has started the job meanwhile, so the job is running


def _joined(call: Call, target: Target, task: EngineTask, spec: AnyJobSpec) -> JobHandle | None:
    """Attach this try to the job; return None if the job has failed or was cancelled."""
    joined = attempts.join(call.store, target.key, call.clock(), task, detach=call.orphan_after is None)
    if joined is None:
        return None
    supplies = Supplies()
    if joined.state not in JOB_ENDED:
        if joined.state is JobState.PENDING and joined.needs_credentials:
            supplies.secrets = call.secrets(spec, credentials.hide(spec.document())[1])
        joined = rounds.Waiter(target, supplies).round()
    return None if joined.state in (JobState.FAILED, JobState.CANCELLED) else JobHandle(target, joined, supplies)
