"""Decide when to stop a LightGBM training early: as soon as a metric has not improved for a number of rounds.

The decision depends only on the metrics, which are the same on all ranks. Therefore all ranks stop at the same round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class Stopping:
    """Record the values of one metric, find the best round, and decide when the training stops early.

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
        """Whether the metric has not improved for `patience` rounds. A metric that was always NaN counts as not
        improved."""
        best = -1 if self.best_round is None else self.best_round
        return self._rounds - 1 - best >= self._patience

    def see(self, value: float) -> None:
        """Record the metric's value of the next round, and update the best round."""
        better = value > self.best_value if self._higher else value < self.best_value
        if better or (self.best_round is None and not math.isnan(value)):
            self.best_round, self.best_value = self._rounds, value
        self._rounds += 1
