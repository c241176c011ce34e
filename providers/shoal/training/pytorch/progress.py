"""Forward and display the metrics that workers log: a status line in a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shoal.training.context import say
from shoal.training.pytorch.context import described

if TYPE_CHECKING:
    from rich.status import Status

# Few lines keep the log short, but a user who watches the log should see that the training is not hanging.
_SAY_EVERY_SECONDS = 10.0

OnMetrics = Callable[[int, dict[str, float], int], None]
"""Function that is called with rank, values and step whenever a rank logs metrics."""


class Metrics:
    """The metrics that a run's ranks have logged; a context manager that removes the status line at the end.

    Args:
        on_metrics: Function to call with rank, values and step, or None.

    Attributes:
        last: Last value of each metric of rank 0.
    """

    def __init__(self, on_metrics: OnMetrics | None = None) -> None:
        self.last: dict[str, float] = {}
        self._on_metrics = on_metrics
        self._steps: Counter[int] = Counter()
        self._said = 0.0
        self._status: Status | None = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def note(self, rank: int, note: dict[str, Any]) -> None:
        """Record a worker's note with metrics, and display the metrics of rank 0."""
        values: dict[str, float] = note["metrics"]
        step = self._steps[rank] if note["step"] is None else int(note["step"])
        self._steps[rank] = step + 1
        if self._on_metrics:
            self._on_metrics(rank, values, step)
        if rank == 0:
            self.last.update(values)
            self._show(described(values, step))

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            if self._status is None:
                from rich.console import Console

                self._status = Console(stderr=True).status(text)
                self._status.start()
            self._status.update(text)
        elif time.monotonic() - self._said >= _SAY_EVERY_SECONDS:
            self._said = time.monotonic()
            say(text)
