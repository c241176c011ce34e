"""Find the models without a recent promotion, and the jobs that have waited in the queue for too long."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, shown
from shoal.jobs.mlflow.promotion_history import confirmed_promotions
from shoal.jobs.specs.register import DEFAULT_ALIAS
from shoal.jobs.submission import MOST_LISTED, list_jobs
from shoal.state import Store
from shoal.state.schema import Job, JobState


@dataclass(frozen=True)
class StaleModel:
    """A model that has had no promotion for longer than a given time.

    Attributes:
        model: Name of the registered model.
        alias: Alias in MLflow's registry that a promotion sets.
        days: Days since the last promotion. For a model that was never promoted: days since its first job. None: no job
            for the model was ever submitted.
        version: Version that was promoted last; None if there was no promotion.
    """

    model: str
    alias: str
    days: float | None
    version: str | None

    def __str__(self) -> str:
        """Return the alert in one sentence."""
        if self.days is None:
            return f"{self.model}: there was no training and no promotion to {self.alias}"
        if self.version is None:
            return f"{self.model}: no promotion to {self.alias} since the first training {_lasted(self.days * 24)} ago"
        return f"{self.model}: no promotion to {self.alias} for {_lasted(self.days * 24)}, since version {self.version}"


@dataclass(frozen=True)
class WaitingJob:
    """A job that has waited in its pool's queue for longer than a given time.

    Attributes:
        job_id: Id of the job.
        pool: Name of the pool.
        holder: Name of the run that submitted the job.
        position: Place in the pool's queue, from 1.
        hours: Hours since the job was submitted.
    """

    job_id: str
    pool: str
    holder: str
    position: int
    hours: float

    def __str__(self) -> str:
        """Return the alert in one sentence."""
        return (
            f"job {self.job_id} of {self.holder} has waited for {_lasted(self.hours)}, "
            f"and is number {self.position} in the queue of pool {self.pool}"
        )


def stale_models(older_than: timedelta, models: Collection[str] | None = None) -> list[StaleModel]:
    """Return the models that have had no promotion for longer than a given time, sorted by name.

    The promotions and jobs are those in shoal's store (``$SHOAL_HOME`` or ``$SHOAL_STATE_URL``); MLflow is not asked. A
    model that was never promoted is found through its jobs, as long as the store contains them. Models of the same name
    in two registries count as one model.

    Args:
        older_than: Time since the last promotion from which a model is returned.
        models: Names of the models to check. A name without any job or promotion is returned too. None: all models.

    Raises:
        InvalidArgumentError: `older_than` is not a positive duration, or `models` is not a list.
    """
    bound = _checked("older_than", older_than)
    if isinstance(models, str):
        raise InvalidArgumentError(f'models="{models}" is a text, but must be a list of names: ["{models}"]')
    now = time.time()
    known = _last_promotions(Store())
    stale = [
        StaleModel(model, alias, (now - since) / 86_400, version)
        for (model, alias), (since, version) in known.items()
        if now - since > bound and (models is None or model in models)
    ]
    missing = set(models or ()) - {model for model, _ in known}
    stale += [StaleModel(model, DEFAULT_ALIAS, None, None) for model in missing]
    return sorted(stale, key=lambda each: (each.model, each.alias))


def waiting_jobs(longer_than: timedelta, pool_name: str | None = None) -> list[WaitingJob]:
    """Return the jobs that have waited in a pool's queue for longer than a given time, the longest wait first.

    Args:
        longer_than: Waiting time from which a job is returned.
        pool_name: Name of the pool. None: all pools.

    Raises:
        InvalidArgumentError: `longer_than` is not a positive duration.
    """
    bound = _checked("longer_than", longer_than)
    now = time.time()
    found = [
        WaitingJob(job.job_id, job.pool, job.holder, job.position, (now - job.created_at) / 3_600)
        for job in list_jobs(pool_name, states=(JobState.PENDING,), limit=MOST_LISTED)
        if job.position is not None and now - job.created_at > bound
    ]
    return sorted(found, key=lambda each: -each.hours)


def _lasted(hours: float) -> str:
    """Format a duration in the unit that suits it, such as ``40.0 days``, ``24.0 hours`` or ``3.5 minutes``."""
    for unit, length, least in (("days", 24, 48), ("hours", 1, 1), ("minutes", 1 / 60, 1 / 60)):
        if hours >= least:
            return f"{hours / length:.1f} {unit}"
    return f"{hours * 3_600:.0f} seconds"


def _last_promotions(store: Store) -> dict[tuple[str, str], tuple[float, str | None]]:
    """Return a dict from (model's name, alias) to the time and the version of the last promotion.

    For a model that was never promoted, the time is that of the model's first job, and the version is None.
    """
    found: dict[tuple[str, str], tuple[float, str | None]] = {}
    for promotion in confirmed_promotions(store):
        found.setdefault((promotion.model, promotion.alias), (promotion.created_at, promotion.version))
    with store.reading() as session:
        for spec, created_at in session.execute(select(Job.spec, Job.created_at).order_by(Job.created_at)):
            if register := spec.get("register"):
                found.setdefault((register["model"], register["alias"]), (created_at, None))
    return found


def _checked(name: str, bound: timedelta) -> float:
    """Check that the time limit of an alert is a positive duration, and return the limit in seconds."""
    if not isinstance(bound, timedelta) or bound <= timedelta(0):
        raise InvalidArgumentError(f"{name}={shown(bound)} must be a positive timedelta, such as timedelta(days=40)")
    return bound.total_seconds()
