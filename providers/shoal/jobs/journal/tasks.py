"""Describe the tasks of workflow engines that submit jobs, and find the jobs that earlier tries of a task have
submitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, JobError
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job, JobState


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
        digest: Digest of the task as it is written in the workflow: its framework, the code of its function, and its
            arguments before templates are rendered. Only a job with the same digest is taken over. None: jobs are not
            compared.
    """

    key: str
    number: int
    cleared: int = 0
    durable: bool = True
    digest: str | None = None

    def is_older_than(self, job: Job) -> bool:
        """Return whether a job already belongs to a newer try of this task."""
        return job.task_key == self.key and (job.task_try or 0) > self.number

    def differs_from(self, job: Job) -> bool:
        """Return whether a job was submitted with another function or other arguments."""
        return None not in (self.digest, job.task_digest) and self.digest != job.task_digest

    def check(self, job: Job) -> None:
        """Refuse to use a job of this task that does not belong to this try or an earlier one.

        Raises:
            JobError: The job is unfinished and belongs to a newer try of the task.
            InvalidArgumentError: The job is unfinished, and this try has submitted it with another function.
        """
        if job.state in JOB_ENDED:
            return
        if self.is_older_than(job):
            raise JobError(
                f'job "{job.id}" belongs to try {job.task_try} of this task, and this is try {self.number}: if try '
                f"{job.task_try} does not exist any more, end the job with `shoal jobs cancel {job.id}`"
            )
        if (job.task_key, job.task_try) == (self.key, self.number) and self.differs_from(job):
            raise InvalidArgumentError(
                f'job "{job.id}" runs for this try of the task ({job.holder}, {self.key}, try {self.number}) with '
                "another function or other arguments. If two Airflows use this store, give each an id of its own: the "
                "option [shoal] deployment in airflow.cfg. If the DAG file was changed while the task ran, end the job "
                f"with `shoal jobs cancel {job.id}`, and clear the task"
            )

    def columns(self) -> dict[str, Any]:
        """Return the columns of a job's row that describe the task."""
        digest = {} if self.digest is None else {"task_digest": self.digest}
        return {"task_key": self.key, "task_try": self.number, **digest}


def jobs_of(store: Store, holder: str, task: TaskTry) -> list[Job]:
    """Return the rows of attempts that tries of a task have submitted, the newest first: those that have not ended, and
    those that have succeeded."""
    # The first try has no earlier try whose result it could use. So the query reads only unfinished jobs, which is fast
    # because of the index on the state column.
    states = JOB_ACTIVE if task.number <= 1 else {*JOB_ACTIVE, JobState.SUCCEEDED}
    query = select(Job).where(Job.task_key == task.key, Job.holder == holder, Job.state.in_(states))
    with store.reading(snapshot=False) as session:
        return list(session.scalars(query.order_by(Job.created_at.desc())))
