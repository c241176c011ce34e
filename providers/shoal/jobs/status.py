"""The status of an attempt of a job, as users read it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from shoal.jobs.journal.listing import AttemptFields
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.results import JobResult
from shoal.jobs.scheduling import Place
from shoal.state.schema import Job
from shoal.training.reporting import Progress


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
