"""Find the jobs that the tries of a workflow engine's task have submitted, even if the tries had different specs."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from shoal.errors import JobError
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, Job, JobState


@dataclass(frozen=True)
class TaskTry:
    """One try of a workflow engine's task that submits a job.

    Attributes:
        key: Name of the task, unique among the tasks of the holder.
        number: Number of the try, from 1.
        cleared: Number of the last try before a user cleared the task (told the engine to run the task again). 0: no
            user has cleared the task.
        durable: Whether the try takes over a job of an earlier try. False: the try ends the job of the earlier try and
            submits a new job.
    """

    key: str
    number: int
    cleared: int = 0
    durable: bool = True

    def is_older_than(self, job: Job) -> bool:
        """Return whether a job already belongs to a newer try of this task."""
        return job.task_key == self.key and (job.task_try or 0) > self.number

    def superseded_by(self, job: Job) -> JobError:
        """Return the error that says that a job already belongs to a newer try of this task."""
        return JobError(
            f'job "{job.id}" belongs to try {job.task_try} of this task, and this is try {self.number}: if try '
            f"{job.task_try} does not exist any more, end the job with `shoal jobs cancel {job.id}`"
        )


def jobs_of(store: Store, holder: str, task: TaskTry) -> list[Job]:
    """Return the rows of attempts that earlier tries of a task have submitted, the newest first.

    An attempt is returned if it has not ended. The newest attempt of the task is also returned if it has succeeded and
    its result has not been returned to a caller yet.
    """
    query = select(Job).where(Job.task_key == task.key, Job.holder == holder).order_by(Job.created_at.desc())
    if task.number <= 1:
        # The first try of a task has no earlier try whose result it could use. So the query reads only unfinished jobs,
        # which is fast because of the index on the state column.
        query = query.where(Job.state.in_(JOB_ACTIVE))
    with store.reading(snapshot=False) as session:
        found = list(session.scalars(query))
    return [
        job
        for place, job in enumerate(found)
        if job.state in JOB_ACTIVE or (place == 0 and job.state is JobState.SUCCEEDED and job.collected_at is None)
    ]
