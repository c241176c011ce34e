"""The series of metrics of a job's attempt: its points, and the form in which the store keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.state.databases import dump_json, load_json


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
