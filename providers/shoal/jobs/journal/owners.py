"""Decide which jobs a task of a workflow engine takes over from its earlier tries, and which jobs a team may change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, JobError
from shoal.jobs import ids
from shoal.pool.holder import Ancestors, asking_team, require_team
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, JOB_ENDED, Job, JobState, Lease


class JobTakenError(JobError):
    """The job belongs to another task run of the same flow run, so this task run needs a job of its own."""


@dataclass(frozen=True)
class TaskTry:
    """One try of a task that the engine always calls by the same name, such as a task of Airflow.

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

    def check(self, job: Job) -> None:
        """Check that this try may use a job of its task.

        Raises:
            JobError: The job is unfinished and belongs to a newer try of the task.
            InvalidArgumentError: The job is unfinished, and this try has submitted it with another function.
        """
        if job.state in JOB_ENDED or job.task_key != self.key:
            return
        if (job.task_try or 0) > self.number:
            raise JobError(
                f'job "{job.id}" belongs to try {job.task_try} of this task, and this is try {self.number}: if try '
                f"{job.task_try} does not exist any more, end the job with `shoal jobs cancel {job.id}`"
            )
        if job.task_try == self.number and self.differs_from(job):
            raise InvalidArgumentError(
                f'job "{job.id}" runs for this try of the task ({job.holder}, {self.key}, try {self.number}) with '
                "another function or other arguments. If two Airflows use this store, give each an id of its own: the "
                "option [shoal] deployment in airflow.cfg. If the DAG file was changed while the task ran, end the job "
                f"with `shoal jobs cancel {job.id}`, and clear the task"
            )

    def takes_over(self, job: Job) -> bool:
        """Return whether the job is of the same function, and no user has cleared the task since then."""
        return self.durable and (job.task_try or 0) > self.cleared and not self.differs_from(job)

    def differs_from(self, job: Job) -> bool:
        """Return whether both digests are known and differ."""
        return None not in (self.digest, job.task_digest) and self.digest != job.task_digest

    def columns(self) -> dict[str, Any]:
        """Return the task's name, the number of the try, and the digest if it is known."""
        digest = {} if self.digest is None else {"task_digest": self.digest}
        return {"task_key": self.key, "task_try": self.number, **digest}


@dataclass(frozen=True)
class FlowTask:
    """A task run of a flow run that may be repeated as a whole, such as one of Prefect.

    A repeated flow run calls its tasks under new names. So a task run takes over the job of an equal task run of an
    earlier try of the flow run: one with the same key, spec and digest. Equal task runs of one try have a job each.

    Attributes:
        key: Name of the flow run, the same in all its tries.
        holder: Holder of the job. In each try of the flow run, a subflow has another one.
        flow_try: Name of the try of the flow run.
        run: Id of the task run, the same in all tries of the task run.
        ancestors: Holders whose end is also the end of the job (`shoal.pool.holder.Ancestors`). In each try, the blocks
            around the task run may be others.
        digest: Digest of the code of a function, which the fingerprint of a spec does not contain. None: the spec has
            no function of the user.
        anew: Whether a new job is submitted even if an earlier try of the flow run has one.
        name: Name of the flow and of the task, as users know them.
    """

    key: str
    holder: str
    flow_try: str
    run: str
    ancestors: Ancestors
    digest: str | None = None
    anew: bool = False
    name: str | None = None

    def check(self, job: Job) -> None:
        """Check that the job does not belong to another task run of the same try."""
        flow_try, _, run = (job.task_run or "").partition(" ")
        if job.task_key == self.key and flow_try == self.flow_try and run != self.run:
            raise JobTakenError(f'job "{job.id}" belongs to another task run: {run}')

    def takes_over(self, job: Job) -> bool:
        """Return whether the job has the same function, is not to be trained anew, and its promotion was not
        withdrawn."""
        is_mine = job.task_run == self._run
        return not self.differs_from(job) and job.task_run is not None and (is_mine or not self.anew)

    def differs_from(self, job: Job) -> bool:
        """Return whether the digests differ."""
        return self.digest != job.task_digest

    def columns(self) -> dict[str, Any]:
        """Return the names of the flow run, its try and the task run, the digest, the holder and its ancestors."""
        return {
            "task_key": self.key,
            "task_name": self.name,
            "task_run": self._run,
            "task_digest": self.digest,
            "holder": self.holder,
            "ancestors": dict(self.ancestors),
        }

    @property
    def _run(self) -> str:
        return f"{self.flow_try} {self.run}"


EngineTask = TaskTry | FlowTask
"""One try of a workflow engine's task that submits a job. If it does not take over a job of the task, it ends this job
and submits a new one."""


def jobs_of(store: Store, holder: str, task: TaskTry) -> list[Job]:
    """Return the rows of attempts that tries of a task have submitted, the newest first: those that have not ended, and
    those that have succeeded."""
    # The first try has no earlier try whose result it could use. So the query reads only unfinished jobs, which is fast
    # because of the index on the state column.
    states = JOB_ACTIVE if task.number <= 1 else {*JOB_ACTIVE, JobState.SUCCEEDED}
    query = select(Job).where(Job.task_key == task.key, Job.holder == holder, Job.state.in_(states))
    return list(store.scalars(query.order_by(Job.created_at.desc())))


def require(job: Job, actor: str | None) -> bool:
    """Raise an error if a job belongs to another team than the one for which this process acts. The run of a workflow
    engine that has submitted the job, and the runs that have called it, may always change it.

    Args:
        job: Row of the job.
        actor: Holder that changes the job. None: this process.

    Returns:
        Whether the actor is not the run of the job.
    """
    is_foreign = actor not in (job.holder, *(job.ancestors or {}))
    if is_foreign or ids.is_interactive(job.holder):  # several persons may act as `cli:root@host`
        require_team(job.team, asking_team(), f'job "{job.id}"')
    return is_foreign


def require_for_run(store: Store, pool: str, holder: str) -> None:
    """Raise an error if a workflow run has an unfinished job or a lease on a pool that belongs to another team than the
    one for which this process acts.

    Args:
        store: Store with the jobs and leases.
        pool: Name of the pool.
        holder: Name of the run.
    """
    with store.reading() as session:
        leases = session.scalars(select(Lease).filter_by(pool=pool, holder=holder)).all()
        jobs = session.scalars(select(Job).filter_by(pool=pool, holder=holder).where(Job.state.in_(JOB_ACTIVE))).all()
    for job in jobs:
        require_team(job.team, asking_team(), f'job "{job.id}"')
    for lease in leases:
        require_team(lease.team, asking_team(), f'the lease of {holder} on pool "{pool}"')


def require_for_version(store: Store, job_id: str, attempt: int, actor: str) -> None:
    """Raise an error if the job that has registered a model version belongs to another team. A version whose job was
    deleted from the store belongs to no team.

    Args:
        store: Store with the job.
        job_id: Id of the job that has registered the version.
        attempt: Number of its attempt.
        actor: Holder that promotes the version, or withdraws its promotion.
    """
    if (job := store.get(Job, (job_id, attempt))) is not None:
        require(job, actor)
