"""Write and read the series of metrics of jobs, in the table `job_metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from shoal.jobs.journal.attempts import Key
from shoal.jobs.metrics.series import MetricPoint, decoded, without_repeated
from shoal.state import Store
from shoal.state.schema import JobMetrics


def write(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write parts of a series, in one statement; a part that exists is replaced."""
    if not rows:
        return
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    statement = insert(JobMetrics)
    key = [JobMetrics.job_id, JobMetrics.attempt, JobMetrics.seq]
    replace = {"points": statement.excluded.points}
    session.execute(statement.on_conflict_do_update(index_elements=key, set_=replace), rows)


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
        [point for part in same for point in decoded(part.points)]
        for _, same in groupby(parts, key=lambda part: (part.attempt, part.generation))
    )


def of_attempt(store: Store, key: Key) -> list[MetricPoint]:
    """Return all points of one attempt in their order, also repeated ones."""
    query = select(JobMetrics.points).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt)
    with store.reading(snapshot=False) as session:
        return [point for points in session.scalars(query.order_by(JobMetrics.seq)) for point in decoded(points)]


def remove(session: Session, key: Key) -> None:
    """Remove the series of an attempt."""
    session.execute(delete(JobMetrics).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt))
