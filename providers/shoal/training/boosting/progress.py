"""Report the finished rounds of a boosting training from rank 0 to the driver while a segment is trained."""

from __future__ import annotations

import time

from shoal.training.boosting.task import History
from shoal.training.context import TrainingContext
from shoal.training.progress import bounded

_REPORT_EVERY_S = 2.0
"""Seconds between two reports: a segment may take hours, a round less than a millisecond."""


class RoundReporter:
    """Rank 0's reporter of finished rounds; on other ranks it does nothing.

    Args:
        context: Training context of the worker.
    """

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._next = time.monotonic() + _REPORT_EVERY_S

    def done(self, rounds: int, history: History) -> None:
        """Report a number of finished rounds and their metrics, unless the last report is recent."""
        if self._context.rank == 0 and time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_EVERY_S
            self._context.note({"rounds": rounds, "metrics": bounded(latest(history))})


def latest(history: History) -> dict[str, float]:
    """Return the last value of each metric, by eval set and metric, for example ``eval-rmse``."""
    return {
        f"{name}-{metric}": float(values[-1])
        for name, metrics in history.items()
        for metric, values in metrics.items()
        if values
    }
