"""Allow any number of rows in an eval set for XGBoost, because each worker evaluates only its own rows."""

from __future__ import annotations

MAX_ROWS: int | None = None
"""Maximum number of rows of an eval set; None: no limit. XGBoost combines the metrics of the workers itself, so the
rows of an eval set are divided among the workers, as those of the training set."""
