from __future__ import annotations

import math

from shoal.training.lightgbm.segments import Stopping


def test_it_stops_after_so_many_rounds_without_improvement() -> None:
    lower = Stopping(2, False, [3, 1, 2])
    assert (lower.best_round, lower.best_value, lower.stopped) == (1, 1, False)
    lower.see(1)  # as good is not better
    assert lower.stopped
    higher = Stopping(2, True, [3, 1])
    assert (higher.best_round, higher.stopped) == (0, False)
    higher.see(4)
    assert (higher.best_round, higher.stopped) == (2, False)


def test_a_metric_that_is_no_number_is_never_the_best() -> None:
    assert Stopping(2, True, [math.nan, 1, math.nan]).best_round == 1
    never = Stopping(2, True, [math.nan, math.nan])
    assert (never.best_round, never.stopped) == (None, True)
    assert not Stopping(1, True).stopped
