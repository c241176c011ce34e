"""Report the number of finished rounds and their metrics from rank 0 to the driver during a boosting training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.training.boosting.messages import History, part_of
from shoal.training.reporting import GangContext
from shoal.training.timeouts import PROGRESS_REPORT_PERIOD_S

_ROUNDS_A_NOTE = 500
"""Largest number of rounds that one message to the driver has: a message of more than 1 MiB ends the worker."""


class RoundReporter:
    """Reporter that sends the number of finished rounds and their metrics from rank 0 to the driver.

    On other ranks, the reporter sends nothing.

    Args:
        context: Gang context of this worker.
        rounds: Number of rounds that the driver knows.
    """

    def __init__(self, context: GangContext, rounds: int) -> None:
        self._context = context
        self._rounds = rounds
        self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S

    def done(self, rounds: int, history: History) -> None:
        """Report the rounds since the last report, unless that is less than 2 s old."""
        if self._context.rank == 0 and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S
            while self._rounds < rounds:
                stop = min(rounds, self._rounds + _ROUNDS_A_NOTE)
                part = part_of(history, self._rounds, stop)
                self._context.note({"first": self._rounds, "rounds": stop, "metrics": part})
                self._rounds = stop

    @contextmanager
    def reporting_on_error(self, history: History) -> Iterator[None]:
        """Report the rounds that are not reported yet if the `with` block, which adds to `history`, fails."""
        try:
            yield
        except Exception:
            self._next = 0.0
            rounds = max((len(values) for metrics in history.values() for values in metrics.values()), default=0)
            if rounds > self._rounds:
                self.done(rounds, history)
            raise


def by_round(history: History) -> list[dict[str, float]]:
    """Return the metrics of each round, under names such as ``eval-rmse`` (eval set "eval", metric "rmse")."""
    rounds: list[dict[str, float]] = []
    for name, metrics in history.items():
        for metric, values in metrics.items():
            rounds += [{} for _ in range(len(values) - len(rounds))]
            for each, value in zip(rounds, values, strict=False):
                each[f"{name}-{metric}"] = float(value)
    return rounds
