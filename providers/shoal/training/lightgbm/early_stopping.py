"""Decide when to stop early, from the metrics alone, so that all ranks, which have the same metrics, decide alike."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Stopping:
    """Early stopping by one metric.

    Args:
        patience: Number of rounds without improvement after which training stops.
        higher_is_better: Whether higher values of the metric are better.
        seen: Values of the metric in the previous rounds.
    """

    def __init__(self, patience: int, higher_is_better: bool, seen: Iterable[float] = ()) -> None:
        self.best_round: int | None = None
        self.best_value = math.nan
        self._patience = patience
        self._higher = higher_is_better
        self._rounds = 0
        for value in seen:
            self.see(value)

    @property
    def stopped(self) -> bool:
        """Whether training stops now; a metric that was always NaN counts as not improved."""
        best = -1 if self.best_round is None else self.best_round
        return self._rounds - 1 - best >= self._patience

    def see(self, value: float) -> None:
        """Record the metric's value of the next round."""
        better = value > self.best_value if self._higher else value < self.best_value
        if better or (self.best_round is None and not math.isnan(value)):
            self.best_round, self.best_value = self._rounds, value
        self._rounds += 1
