"""Receive the metrics that workers log, pass them to the caller, and display the metrics of rank 0."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shoal.training.progress import MetricSink, OnProgress, Progress, ProgressDisplay


class Metrics(ProgressDisplay):
    """Context manager that receives and displays the metrics of a run's ranks, and removes the display at the end.

    Args:
        sink: Receiver of the metrics of all ranks, or None.
        on_progress: Function to call with the step and the last metrics of rank 0, or None.

    Attributes:
        last: Last value of each metric of rank 0.
    """

    def __init__(self, sink: MetricSink | None = None, on_progress: OnProgress | None = None) -> None:
        super().__init__(first_line_s=0.0)
        self.last: dict[str, float] = {}
        self._sink = sink
        self._on_progress = on_progress
        self._steps: Counter[int] = Counter()

    def note(self, rank: int, note: dict[str, Any]) -> None:
        """Pass on a worker's metrics; record and display the metrics of rank 0."""
        values: dict[str, float] = note["metrics"]
        step = self._steps[rank] if note["step"] is None else int(note["step"])
        self._steps[rank] = step + 1
        if self._sink:
            self._sink.log(rank, values, step)
        if rank == 0:
            self.last.update(values)
            self.show(Progress(step, None, "steps", values))
            if self._on_progress:
                self._on_progress(Progress(step, None, "steps", dict(self.last)))

    def continued(self) -> None:
        """Note that the function is called again, and may continue from its last checkpoint."""
        if self._sink:
            self._sink.continued()
