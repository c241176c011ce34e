"""Limit the number of rows of an eval set for LightGBM, because every worker evaluates the whole eval set."""

from __future__ import annotations

MAX_ROWS: int | None = 1_000_000
"""Maximum number of rows of an eval set.

A LightGBM worker evaluates only its own rows, and LightGBM does not combine the metrics of the workers. Each worker
therefore gets all rows of an eval set, so that the metrics cover all rows and all workers stop early at the same round.
The maximum keeps the copies of an eval set small. `shoal.training.boosting.inputs` checks it.
"""
