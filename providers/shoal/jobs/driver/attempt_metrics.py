"""The series of metrics of the attempt that this driver runs: written into the store with the heartbeats, and sent to
the MLflow run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from shoal.jobs.journal import metric_points
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.metric_points import MetricPoint, encoded
from shoal.jobs.timeouts import METRICS_PERIOD_S
from shoal.secrets.redaction import redact
from shoal.state.databases import storable
from shoal.state.schema import Job

if TYPE_CHECKING:
    from shoal.jobs.mlflow_run import Run


_AT_ONCE = 1000
"""Number of points after whose metrics the feed notes how many MLflow has."""


class MlflowFeed:
    """Sender of metrics to MLflow.

    Args:
        run: MLflow run of the attempt.

    Attributes:
        sent: Number of points that MLflow has.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._points: list[MetricPoint] = []
        self._usage: list[tuple[str, float, int, float]] = []
        self._stop = threading.Event()
        self._is_away = False
        self.sent = 0
        self._thread = threading.Thread(target=self._send_at_times, name="shoal-mlflow-metrics", daemon=True)
        self._thread.start()

    def add(self, point: MetricPoint) -> None:
        """Send the metrics of a step with the next batch."""
        with self._lock:
            self._points.append(point)

    def add_usage(self, metrics: list[tuple[str, float, int, float]]) -> None:
        """Send the usage of a worker (name, value, step, time) with the next batch."""
        with self._lock:
            self._usage += metrics

    def flush(self) -> None:
        """Send everything now, and raise the error of MLflow if this fails."""
        with self._sending:
            while points := self._points[:_AT_ONCE]:
                self._run.log_metrics(
                    [(name, value, point.step, point.at) for point in points for name, value in point.values.items()]
                )
                with self._lock:
                    del self._points[: len(points)]
                self.sent += len(points)
            with self._lock:
                usage, self._usage = self._usage, []
            if usage:
                # User code has not asked for these metrics, so they end no job, and are not sent again.
                with suppress(Exception):
                    self._run.log_metrics(usage)

    def close(self) -> None:
        """End the thread; a batch that it is sending may take longer."""
        self._stop.set()

    def _send_at_times(self) -> None:
        while not self._stop.wait(METRICS_PERIOD_S):
            try:
                self.flush()
                self._is_away = False
            except Exception as error:
                if not self._is_away:
                    print(f"the metrics cannot be sent to MLflow now, and will be sent later: {error}", flush=True)
                self._is_away = True


_MOST_POINTS = 256
_MOST_VALUES = 800
"""Limits of one part of the series, about 16 KB: the driver writes the last row again with each heartbeat."""

_MOST_NAMES = 200
_LONGEST_NAME = 100
_MOST_IN_SERIES = 100_000
"""Limits of an attempt's series, because user code chooses names and steps. MLflow gets all metrics."""

_MOST_COMPARED = 10_000
"""Number of the newest values that are compared with those of a training that continues from a checkpoint."""


@dataclass
class _Part:
    """A row of `job_metrics`."""

    seq: int
    generation: int
    points: list[MetricPoint] = field(default_factory=list)
    stored: int = 0
    """Number of points that are in the store."""

    @property
    def is_full(self) -> bool:
        return len(self.points) >= _MOST_POINTS or sum(len(each.values) for each in self.points) >= _MOST_VALUES


Batch = list[tuple[_Part, int, dict[str, Any]]]
"""Points for one transaction: each part, the number of its points, and its row."""


class MetricSeries:
    """Receiver of the metrics of all ranks (a `MetricSink`). All methods may be called from any thread.

    Args:
        key: The attempt.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        self._lock = threading.Lock()
        self._parts: list[_Part] = []
        self._next_seq = self._generation = self._count = 0
        self._last = 0.0
        self._is_new_generation = True
        self._names: dict[str, str] = {}
        self._left_out = False
        self._seen: dict[tuple[str, int], float] = {}
        self.feed: MlflowFeed | None = None
        """Sends the metrics to MLflow; None if the job has no MLflow run."""

    def log(self, rank: int, values: Mapping[str, float], step: int) -> None:
        """Add the metrics of a rank at a step; the names of other ranks than 0 get a prefix such as ``rank-1/``."""
        front = f"rank-{rank}/" if rank else ""
        named = {front + name: float(value) for name, value in values.items()}
        with self._lock:
            # Readers know new points by their times, so no two points have the same.
            self._last = max(time.time(), self._last + 1e-6)
            point = MetricPoint(step, self._last, named)
            if self.feed:
                # A point without new values is added, too, so that both count the same points.
                self.feed.add(self._not_repeated(point))
            self._keep(point)

    def continued(self) -> None:
        """Begin a new generation: the training continues from a checkpoint, and may repeat some steps."""
        with self._lock:
            self._is_new_generation = True

    def prepare(self) -> Batch:
        """Encode the points that the store does not have, before the transaction that calls :meth:`write`."""
        with self._lock:
            parts = [(part, len(part.points)) for part in self._parts if part.stored < len(part.points)]

        def row(part: _Part, number: int) -> dict[str, Any]:
            points = encoded(part.points[:number])
            return asdict(self._key) | {"seq": part.seq, "generation": part.generation, "points": points}

        return [(part, number, row(part, number)) for part, number in parts]

    def write(self, batch: Batch, session: Session, job: Job) -> None:
        """Write prepared points; no other process writes this attempt's series."""
        metric_points.write(session, [row for _, _, row in batch])
        if self.feed:
            job.metrics_in_mlflow = self.feed.sent

    def written(self, batch: Batch) -> None:
        """Note after the transaction that the store has the points, and forget the full parts."""
        with self._lock:
            for part, number, _ in batch:
                part.stored = max(part.stored, number)
            last = self._parts[-1:]
            self._parts = [part for part in self._parts if part in last or part.stored < len(part.points)]

    def flush(self) -> None:
        """Send all metrics to MLflow that it does not have, and raise its error if it refuses them or is away."""
        if self.feed:
            self.feed.flush()

    def close(self) -> None:
        """Send the last metrics to MLflow, and end the thread that does so."""
        if self.feed:
            self.feed.close()
            self.feed.flush()

    def _not_repeated(self, point: MetricPoint) -> MetricPoint:
        """Leave out values that MLflow has already: a boosting training that continues repeats rounds exactly."""
        values = {name: each for name, each in point.values.items() if self._seen.get((name, point.step)) != each}
        for name, each in values.items():
            self._seen[name, point.step] = each
        while len(self._seen) > _MOST_COMPARED:
            del self._seen[next(iter(self._seen))]
        return MetricPoint(point.step, point.at, values)

    def _keep(self, point: MetricPoint) -> None:
        values = {short: each for name, each in point.values.items() if (short := self._name(name)) is not None}
        if (len(values) < len(point.values) or self._count >= _MOST_IN_SERIES) and not self._left_out:
            self._left_out = True
            print(
                f"the series of metrics in the store has at most {_MOST_IN_SERIES:,} points and {_MOST_NAMES} names: "
                "further metrics are only sent to MLflow",
                flush=True,
            )
        if not values or self._count >= _MOST_IN_SERIES:
            return
        self._count += 1
        part = self._parts[-1] if self._parts else None
        if part is None or part.is_full or self._is_new_generation:
            if self._is_new_generation and self._next_seq:
                self._generation += 1
            self._is_new_generation = False
            part = _Part(self._next_seq, self._generation)
            self._next_seq += 1
            self._parts.append(part)
        part.points.append(MetricPoint(point.step, point.at, values))

    def _name(self, name: str) -> str | None:
        if name not in self._names and len(self._names) < _MOST_NAMES:
            self._names[name] = storable(redact(name))[:_LONGEST_NAME]
        return self._names.get(name)
