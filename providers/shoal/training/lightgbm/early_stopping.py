"""When to stop early. Pure: every rank sees the same metrics, so every rank decides alike."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Stopping:
    """Watches one metric, round by round.

    Args:
        patience: Rounds without improvement to stop after.
        higher_is_better: Whether more is better.
        seen: Its values so far.
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
        """Whether training ends here; a metric that has never been a number does not improve either."""
        best = -1 if self.best_round is None else self.best_round
        return self._rounds - 1 - best >= self._patience

    def see(self, value: float) -> None:
        """Take note of the next round's value."""
        better = value > self.best_value if self._higher else value < self.best_value
        if better or (self.best_round is None and not math.isnan(value)):
            self.best_round, self.best_value = self._rounds, value
        self._rounds += 1
