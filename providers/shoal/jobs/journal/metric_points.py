"""The series of metrics of jobs: their points, and the rows of the table `job_metrics` that keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.jobs.journal.attempts import Key
from shoal.state import Store
from shoal.state.databases import dump_json, load_json
from shoal.state.schema import JobMetrics


@dataclass(frozen=True)
class MetricPoint:
    """Metrics of a training at one step.

    Attributes:
        step: Number of the boosting round, counted from 0, or the step that the training function has logged.
        at: Time at which the driver got the metrics, in seconds since the epoch.
        values: Metrics by name, such as ``eval-rmse`` for boosting (eval set "eval", metric "rmse"). Metrics of other
            ranks than 0 are named ``rank-1/loss``.
    """

    step: int
    at: float
    values: Mapping[str, float]


def curves(points: Sequence[MetricPoint], framework: str) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """Return what the steps of a job count ("round" or "step"), and the steps and values of each metric, for people:
    boosting rounds are counted from 1, as in a job's progress; all other steps, such as a search's trials, as logged.
    """
    is_boosting = framework in BOOSTING_LIBRARIES
    names = dict.fromkeys(name for point in points for name in point.values)
    return "round" if is_boosting else "step", {
        name: [(point.step + is_boosting, point.values[name]) for point in points if name in point.values]
        for name in names
    }


def encoded(points: Sequence[MetricPoint]) -> str:
    """Return points by column as JSON, without repeating the names for each point."""
    names = dict.fromkeys(name for point in points for name in point.values)
    columns = {
        "step": [point.step for point in points],
        "at": [point.at for point in points],
        "values": {name: [point.values.get(name) for point in points] for name in names},
    }
    return dump_json(columns)


def decoded(text: str) -> list[MetricPoint]:
    """Return the points that :func:`encoded` has written."""
    columns = load_json(text)
    values: Mapping[str, Sequence[float | None]] = columns["values"]
    return [
        MetricPoint(step, at, {name: value for name, column in values.items() if (value := column[place]) is not None})
        for place, (step, at) in enumerate(zip(columns["step"], columns["at"], strict=True))
    ]


def without_repeated(generations: Iterable[Sequence[MetricPoint]]) -> list[MetricPoint]:
    """Join the points of generations, the oldest first.

    A training that continues from a checkpoint repeats some steps: from the first step of a metric in a later
    generation on, the metric's values of earlier generations are left out.
    """
    kept: list[MetricPoint] = []
    for points in generations:
        first: dict[str, int] = {}
        for point in points:
            for name in point.values:
                first[name] = min(point.step, first.get(name, point.step))
        cut = [
            MetricPoint(
                point.step,
                point.at,
                {name: value for name, value in point.values.items() if name not in first or point.step < first[name]},
            )
            for point in kept
        ]
        kept = [*(point for point in cut if point.values), *points]
    return kept


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
    return without_repeated(
        [point for part in same for point in decoded(part.points)]
        for _, same in groupby(store.rows(query), key=lambda part: (part.attempt, part.generation))
    )


def of_attempt(store: Store, key: Key) -> list[MetricPoint]:
    """Return all points of one attempt in their order, also repeated ones."""
    query = select(JobMetrics.points).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt)
    return [point for points in store.scalars(query.order_by(JobMetrics.seq)) for point in decoded(points)]


def remove(session: Session, key: Key) -> None:
    """Remove the series of an attempt."""
    session.execute(delete(JobMetrics).where(JobMetrics.job_id == key.job_id, JobMetrics.attempt == key.attempt))
