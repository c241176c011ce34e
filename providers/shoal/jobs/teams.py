"""The rule that protects jobs, and the model versions that they have registered, from other teams."""

from __future__ import annotations

from sqlalchemy import select

from shoal.jobs import ids
from shoal.jobs.journal.attempts import Key
from shoal.pool.holder import asking_team, require_team
from shoal.state import Store
from shoal.state.schema import JOB_ACTIVE, Job, Lease


def require(job: Job, actor: str | None) -> bool:
    """Raise an error if a job belongs to another team than the one for which this process acts. The run of a workflow
    engine that has submitted the job, and the runs that have called it, may always change it.

    Args:
        job: Row of the job.
        actor: Holder that changes the job. None: this process.

    Returns:
        Whether the actor is not the run of the job.

    Raises:
        TeamError: The job belongs to another team.
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

    Raises:
        TeamError: A job or lease belongs to another team.
    """
    with store.reading() as session:
        leases = session.scalars(select(Lease).filter_by(pool=pool, holder=holder)).all()
        jobs = session.scalars(select(Job).filter_by(pool=pool, holder=holder).where(Job.state.in_(JOB_ACTIVE))).all()
    for job in jobs:
        require_team(job.team, asking_team(), f'job "{job.id}"')
    for lease in leases:
        require_team(lease.team, asking_team(), f'the lease of {holder} on pool "{pool}"')


def require_for_version(store: Store, key: Key, actor: str) -> None:
    """Raise an error if the job that has registered a model version belongs to another team. A version whose job was
    deleted from the store belongs to no team.

    Args:
        store: Store with the job.
        key: Attempt that has registered the version.
        actor: Holder that promotes the version, or withdraws its promotion.

    Raises:
        TeamError: The job belongs to another team.
    """
    with store.reading(snapshot=False) as session:
        job = session.get(Job, (key.job_id, key.attempt))
    if job is not None:
        require(job, actor)
