"""A thread that sends a job's metrics to its MLflow run in batches. A server that is away never ends the training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.jobs.journal.metric_series import MetricPoint
from shoal.jobs.timeouts import METRICS_PERIOD_S

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
                self._run.log_metrics(list(_metrics(points)))
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


def _metrics(points: list[MetricPoint]) -> Iterator[tuple[str, float, int, float]]:
    for point in points:
        for name, value in point.values.items():
            yield name, value, point.step, point.at
