"""The bins of all workers, out of one sample of all rows.

Left to itself LightGBM finds the bins of a feature on one rank, in that rank's rows: where the data is sorted, those
are not like the others', and the model is much the worse for it. So each worker contributes to a sample of all rows,
and every worker makes the same bins of all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np

from shoal.data.categories import Categories
from shoal.training.lightgbm.categories import note


def make_reference(
    rows: np.ndarray, features: Sequence[str], params: Mapping[str, Any], categories: Categories
) -> lightgbm.Dataset:
    """The dataset whose bins all others take over.

    Args:
        rows: The whole sample.
        features: Names of its columns.
        params: LightGBM's parameters.
        categories: Of the columns that have any.
    """
    # All rows of the sample count, and no network is up: every worker finds all bins by itself.
    params = {**params, "bin_construct_sample_cnt": max(1, len(rows)), "num_machines": 1}
    reference = lightgbm.Dataset(
        rows,
        label=np.zeros(len(rows)),
        feature_name=list(features),
        categorical_feature=params.pop("categorical_feature", "auto"),
        params=params,
    ).construct()
    note(reference, categories)
    return reference
