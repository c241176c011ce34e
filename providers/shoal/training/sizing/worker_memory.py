"""Predict the peak memory of one worker, by term, from the number of its rows, the columns and the parameters.

The terms follow the source of the libraries (XGBoost 3.2: ``quantile.h``, ``gradient_index.h``, ``column_matrix.h``,
``histogram.h``; LightGBM 4.7: ``dataset_loader.cpp``, ``feature_histogram.hpp``). The measured constants are in
:mod:`shoal.training.sizing.constants`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.training.sizing.constants import FIXED_BYTES, FRAGMENT_UNITS, IDLE_BYTES, PAGES_IN_MEMORY, SCORE_BYTES

HISTOGRAM_BYTES = 16
"""Bytes per bin of a histogram: the sums of two gradients as float64."""
_SUMMARY_BYTES = 16
"""Bytes per entry of a summary of XGBoost's sketches: four float32."""
_SHOWN_TERMS = 4
_UPPER_BOUNDS = ("sketches", "histograms")
"""Terms that are much smaller than predicted if columns have few distinct values, such as 0 and 1, or if trees stay
small: 83 instead of 510 MiB for the sketches of 50,000 rows of 500 such columns."""
_SKETCH_FACTOR = 8
"""Number of entries of a summary per bin (``WQSketch::kFactor``)."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Rows, columns and parameters on which the memory of one boosting worker depends.

    Args:
        rows: Training rows of this worker.
        eval_rows: Rows of this worker's eval sets, without those that are the training set.
        features: Number of feature columns of this worker.
        max_bin: Number of bins per feature column; 0: the bins are found on a GPU.
        bins: Number of bins of all feature columns.
        bin_bytes: Bytes that store the bin of one value in the order of the columns.
        row_bin_bytes: Bytes that store the bin of one value in the order of the rows.
        nodes: Largest number of nodes or leaves whose histograms a tree keeps.
        outputs: Number of raw scores per row.
        feature_bytes: Bytes of the features of one decoded row, in the types of the files.
        batch_bytes: Bytes of the largest decoded batch of rows.
        workers: Number of workers.
        sample_rows: Number of rows in the sample from which LightGBM finds its bins, of all workers.
        whole_sample: Whether the sample contains all rows of this worker.
        cache_bytes: Bytes of the decoded rows that stay in memory while the matrices are built.
        keeps_cache: Whether these rows stay in memory during the training, too.
        by_columns: Whether the worker has all rows and a part of the columns, which are then not quantised row by row.
    """

    rows: int
    eval_rows: int
    features: int
    max_bin: int
    bins: int
    bin_bytes: int
    row_bin_bytes: int
    nodes: int
    outputs: int
    feature_bytes: int
    batch_bytes: int
    workers: int = 1
    sample_rows: int = 0
    whole_sample: bool = False
    cache_bytes: int = 0
    keeps_cache: bool = False
    by_columns: bool = False


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Predicted memory of one worker: its peak is that of the idle process and of the largest phase.

    Args:
        idle: Bytes of the process before it reads any row.
        phases: Terms of each phase in bytes: name of the phase -> name of the term -> bytes.
    """

    idle: int
    phases: Mapping[str, Mapping[str, int]]

    @property
    def above_idle(self) -> int:
        """Largest number of bytes beside the idle process."""
        return sum(self._largest().values())

    @property
    def least_above_idle(self) -> int:
        """Smallest number of bytes beside the idle process, whatever the values in the columns are."""
        return max(
            sum(size for name, size in terms.items() if name not in _UPPER_BOUNDS) for terms in self.phases.values()
        )

    @property
    def peak(self) -> int:
        """Largest number of bytes of the process."""
        return self.idle + self.above_idle

    def terms(self) -> dict[str, int]:
        """Return the terms of the largest phase, the largest term first."""
        terms = sorted(self._largest().items(), key=lambda term: -term[1])
        return {name: size for name, size in terms if size}

    def text(self) -> str:
        """Return the largest terms as text, such as ``sketches 458 MiB, bins 24 MiB``."""
        return ", ".join(f"{name} {mib(size)}" for name, size in [*self.terms().items()][:_SHOWN_TERMS])

    def _largest(self) -> Mapping[str, int]:
        return max(self.phases.values(), key=lambda terms: sum(terms.values()))


def mib(size: float) -> str:
    """Return a number of bytes as text in MiB or, from 10 GiB on, in GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 10 * 2**30 else f"{math.ceil(size / 2**20):,} MiB"


def worker_memory(framework: str, load: WorkerLoad, *, on_disk: bool = False) -> WorkerMemory:
    """Predict the memory of one boosting worker.

    Args:
        framework: ``xgboost`` or ``lightgbm``.
        load: What the worker trains on.
        on_disk: Whether XGBoost keeps the quantised rows in files.
    """
    phases = _xgboost_phases(load, on_disk=on_disk) if framework == "xgboost" else _lightgbm_phases(load)
    return WorkerMemory(IDLE_BYTES[framework], phases)


def _xgboost_phases(load: WorkerLoad, *, on_disk: bool) -> dict[str, dict[str, int]]:
    bins = load.rows * load.features * load.row_bin_bytes
    evals = load.eval_rows * load.features * load.row_bin_bytes
    every = load.rows + load.eval_rows
    common = {"libraries": FIXED_BYTES, "batch": 2 * load.batch_bytes, "rows kept decoded": load.cache_bytes}
    # The rows of a training by columns as XGBoost's entries of 8 bytes a value.
    values = 8 * every * load.features if load.by_columns else 0
    # While trees grow, the bins are in memory by row and by column; on disk, one page at a time is.
    by_column = load.rows * load.features * load.bin_bytes
    page = PAGES_IN_MEMORY * load.batch_bytes
    return {
        "finding bins": {**common, "sketches": _sketch_bytes(load), "values": values + values // 2},
        "binning": {**common, "bins": page if on_disk else bins + evals, "labels": 8 * every},
        "training": {
            "libraries": FIXED_BYTES,
            "values": values,
            "bins": page if on_disk else bins + by_column + evals,
            "rows": SCORE_BYTES["xgboost"] * every * load.outputs,
            "histograms": HISTOGRAM_BYTES * load.bins * load.nodes,
        },
    }


def _sketch_bytes(load: WorkerLoad) -> int:
    """Return the memory of the sketches with which XGBoost finds the bins of all columns at once.

    A sketch has a queue of 2L values, a buffer of 2L entries, and a list of levels of L entries each: each further
    level holds the summary of twice as many rows.
    """
    if not load.max_bin:
        return 0
    rows = max(1, load.rows)
    level = 1
    while 2**level * min(rows, _SKETCH_FACTOR * load.max_bin * level) < rows:
        level += 1
    entries = min(rows, _SKETCH_FACTOR * load.max_bin * level)
    full = rows // (2 * entries)
    # A queue entry has half the size of a summary's entry.
    units: float = 3 + full.bit_length() + 1 if full else 1
    # Lists that grow leave free blocks that are too short for the next list.
    units += FRAGMENT_UNITS if full.bit_length() > 1 else 0
    merged = _SKETCH_FACTOR * load.max_bin * (1 + (load.workers if load.workers > 1 else 0))
    return int(_SUMMARY_BYTES * load.features * (units * entries + min(rows * load.workers, merged)))


def _lightgbm_phases(load: WorkerLoad) -> dict[str, dict[str, int]]:
    bins = (load.rows + load.eval_rows) * load.features * load.bin_bytes
    every = load.rows + load.eval_rows
    kept = {"rows kept decoded": load.cache_bytes}
    sample = load.sample_rows * load.feature_bytes
    return {
        # Rank 0 holds the sample of all workers, and its values as float64.
        "finding bins": {
            "libraries": FIXED_BYTES,
            "sample": sample,
            "values of the sample": 8 * load.sample_rows * load.features,
            "batch": load.batch_bytes,
            **kept,
        },
        "binning": {
            "libraries": FIXED_BYTES,
            "bins": bins,
            "sample": sample if load.whole_sample else 0,
            "batch": load.batch_bytes,
            "labels": 8 * every,
            **kept,
        },
        "training": {
            "libraries": FIXED_BYTES,
            "bins": bins,
            "rows": SCORE_BYTES["lightgbm"] * every * load.outputs,
            "histograms": HISTOGRAM_BYTES * load.bins * load.nodes,
            **(kept if load.keeps_cache else {}),
        },
    }
