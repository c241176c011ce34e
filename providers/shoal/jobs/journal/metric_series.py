"""Write and read the series of metrics of jobs, in the table `job_metrics`."""

from __future__ import annotations

from itertools import groupby

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from shoal.jobs.journal.attempts import Key
from shoal.jobs.metrics.series import MetricPoint, points_of, without_repeated
from shoal.state import Store
from shoal.state.schema import JobMetrics


def read(store: Store, key: Key) -> list[MetricPoint]:
    """Return the series of a job up to and including an attempt.

    An attempt that repeats steps of an earlier one replaces these steps.
    """
    query = (
        select(JobMetrics.attempt, JobMetrics.generation, JobMetrics.points)
        .where(JobMetrics.job_id == key.job_id, JobMetrics.attempt <= key.attempt)
        .order_by(JobMetrics.attempt, JobMetrics.seq)
    )
    with store.reading(snapshot=False) as session:
        parts = session.execute(query).all()
    return without_repeated(
        [point for part in same for point in points_of(part.points)]
        for _, same in groupby(parts, key=lambda part: (part.attempt, part.generation))
    )


def of_attempt(store: Store, key: Key) -> list[MetricPoint]:
    """Return all points of one attempt in their order, also repeated ones."""
    query = select(JobMetrics.points).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt)
    with store.reading(snapshot=False) as session:
        return [point for points in session.scalars(query.order_by(JobMetrics.seq)) for point in points_of(points)]


def remove(session: Session, key: Key) -> None:
    """Remove the series of an attempt."""
    session.execute(delete(JobMetrics).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt))
