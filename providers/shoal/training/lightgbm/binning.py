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
from typing import Any

import lightgbm
import numpy as np

from shoal.data.categories import Categories
from shoal.training.lightgbm.categories import note


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins of all features, in a form that can be sent to other workers.

    Args:
        binary: LightGBM's binary file of a dataset with these bins and a single row.
        features: Names of the columns.
        params: LightGBM's parameters of the dataset.
    """

    binary: bytes
    features: tuple[str, ...]
    params: dict[str, Any]

    def reference(self, categories: Categories) -> lightgbm.Dataset:
        """Build the reference dataset, whose bins all other datasets of the training use.

        Args:
            categories: Categorical column -> its categories.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bins")
            file.write_bytes(self.binary)
            reference = lightgbm.Dataset(file, feature_name=list(self.features), params=dict(self.params)).construct()
        note(reference, categories)
        return reference


def find_bins(rows: np.ndarray, features: Sequence[str], params: Mapping[str, Any], threads: int) -> Bins:
    """Find the bins of all features. The number of threads does not change the bins.

    Only one worker calls this function, because LightGBM copies the whole sample as float64.

    Args:
        rows: The whole sample, float32 ``[rows, columns]``.
        features: Names of the columns.
        params: LightGBM's parameters.
        threads: Number of threads.
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
    reference = lightgbm.Dataset(
        rows,
        label=np.zeros(len(rows)),
        feature_name=list(features),
        categorical_feature=params.pop("categorical_feature", "auto"),
        params=params,
    ).construct()
    # The bins are saved as a dataset with one row, because the file of the whole sample would be large.
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
        # Each worker builds its datasets with these parameters. The number of threads is that of one worker again,
        # because all workers of a node build their datasets at the same time.
        return Bins(file.read_bytes(), tuple(features), {**reference.get_params(), "num_threads": each})
