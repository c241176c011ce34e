"""Measured constants of the memory formulas. ``python -m tests.benchmarks.worker_memory --write`` writes those of the
libraries, with the date and the machine.
"""

from __future__ import annotations

MEASURED = "2026-11-29 on 2 CPUs with 23 GiB, Python 3.11.7, xgboost 3.2.0, lightgbm 4.7.0"

IDLE_BYTES = {"xgboost": 118 * 2**20, "lightgbm": 118 * 2**20, "pytorch": 446 * 2**20}
"""Resident memory of a worker that has imported its library and has read nothing."""

FIXED_BYTES = 25 * 2**20
"""Memory of Arrow, of the readers of Parquet and of the library, from the first row on, whatever the size of the
dataset."""

SCORE_BYTES = {"xgboost": 51, "lightgbm": 49}
"""Bytes per row and output while trees grow: label, score, gradients, position in the tree, and their copies."""

FRAGMENT_UNITS = 1.5
"""Free memory between the sketches of XGBoost, in lengths of one level of a sketch, if a sketch has several levels."""

PAGES_IN_MEMORY = 4
"""Pages of quantised rows on disk that XGBoost has in memory, each as large as the decoded batch it was made from."""
