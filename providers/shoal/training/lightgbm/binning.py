"""Find the histogram bins (intervals of feature values) that all workers use, from one sample of all rows.

LightGBM replaces each value of a feature by the number of its bin (interval of values). By default LightGBM finds the
bins of a feature on one rank and from that rank's rows only. If the data is sorted, the rows of one rank differ from
those of the other ranks, and the model becomes much worse. Therefore each worker contributes to a sample of all rows.
Rank 0 computes the bins from the whole sample, and sends them to all workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightgbm
import numpy as np

from shoal.data.categories import Categories
from shoal.data.matrix import to_vector
from shoal.training.lightgbm.model import note

if TYPE_CHECKING:
    import pyarrow as pa

_ZERO = np.float32(1e-35)
"""Largest absolute value that LightGBM takes for zero (``kZeroThreshold`` in ``meta.h``)."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Bins of all features (intervals of feature values), in a form that can be sent to other workers.

    Args:
        binary: LightGBM's binary file of a dataset with these bins and a single row.
        features: Names of the columns.
        params: LightGBM's parameters of the dataset.
    """

    binary: bytes
    features: tuple[str, ...]
    params: dict[str, Any]

    def reference(self, categories: Categories) -> lightgbm.Dataset:
        """Build the LightGBM dataset whose bins all other datasets of the training use."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bins")
            file.write_bytes(self.binary)
            reference = lightgbm.Dataset(file, feature_name=list(self.features), params=dict(self.params)).construct()
        note(reference, categories)
        return reference


def find_bins(rows: pa.Table, features: Sequence[str], params: Mapping[str, Any], threads: int) -> Bins:
    """Find the bins of all features. The number of threads does not change the bins.

    Only one worker calls this function, because LightGBM needs the whole sample as float64.
    """
    each = params.get("num_threads", 1)
    # With these settings LightGBM uses all rows of the sample, and finds the bins in this worker without connecting to
    # the other workers.
    params = {
        **params,
        "bin_construct_sample_cnt": max(1, len(rows)),
        "num_machines": 1,
        "num_threads": threads,
    }
    categorical = params.pop("categorical_feature", None)
    if categorical is not None:
        # LightGBM's C library needs column numbers. `lightgbm.Dataset` converts names to numbers only for a dataset
        # with rows. `reference` is a dataset without rows, so the names are converted here.
        numbers = {name: number for number, name in enumerate(features)}
        params["categorical_column"] = sorted(numbers.get(column, column) for column in categorical)
    reference = _without_rows(rows, params)
    # The bins are saved as a dataset with one row, because LightGBM cannot save a dataset without rows.
    single = lightgbm.Dataset(
        np.zeros((1, len(features)), np.float32),
        label=np.zeros(1),
        reference=reference,
        feature_name=list(features),
        params=reference.get_params(),
    ).construct()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bins")
        single.save_binary(file)
        # Each worker builds its datasets with these parameters. The number of threads is reset to that of one worker,
        # because all workers of a node build their datasets at the same time.
        return Bins(file.read_bytes(), tuple(features), {**reference.get_params(), "num_threads": each})


def _without_rows(rows: pa.Table, params: Mapping[str, Any]) -> lightgbm.Dataset:
    """Create a dataset that has the bins of a sample, but not the sample's rows.

    The constructor of `lightgbm.Dataset` would also convert the sample to bins, which takes longer than finding the
    bins.
    """
    every = np.arange(len(rows), dtype=np.int32)
    values, indices = [], []
    for name in rows.column_names:
        column = to_vector(rows, name)
        # LightGBM gets only the values that are not zero. Missing values (NaN) count as not zero.
        used = ~(np.abs(column) <= _ZERO)
        is_full = bool(used.all())
        values.append(column if is_full else column[used])
        indices.append(every if is_full else every[used])
    dataset = lightgbm.Dataset(None, params=dict(params))
    return dataset._init_from_sample(values, indices, len(rows), len(rows))
