"""Report the number of finished rounds and the metrics from rank 0 to the driver during a boosting training."""

from __future__ import annotations

import time

from shoal.training.boosting.checkpoints import History
from shoal.training.context import GangContext
from shoal.training.progress import bounded
from shoal.training.timeouts import PROGRESS_REPORT_PERIOD_S


class RoundReporter:
    """Reporter that sends the number of finished rounds and the metrics from rank 0 to the driver.

    On other ranks, the reporter sends nothing.

    Args:
        context: Gang context of this worker.
    """

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S

    def done(self, rounds: int, history: History) -> None:
        """Report the number of finished rounds and their metrics, unless the last report is less than 2 s old."""
        if self._context.rank == 0 and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S
            self._context.note({"rounds": rounds, "metrics": bounded(latest(history))})


def latest(history: History) -> dict[str, float]:
    """Return the last value of each metric, under a key such as ``eval-rmse`` (eval set "eval", metric "rmse")."""
    return {
        f"{name}-{metric}": float(values[-1])
        for name, metrics in history.items()
        for metric, values in metrics.items()
        if values
    }
