"""Find the histogram bins (intervals of feature values) that all workers use, from one sample of all rows.

LightGBM replaces each value of a feature by the number of its bin (interval of values). By default LightGBM finds the
bins of a feature on one rank and from that rank's rows only. If the data is sorted, these
rows differ from the other ranks' rows, and the model becomes much worse. Therefore each worker contributes to a sample
of all rows, and every worker computes the same bins from the whole sample.
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
    """Build the reference dataset from the sample; all other datasets of the training use the reference's bins.

    Args:
        rows: The whole sample, float32 ``[rows, columns]``.
        features: Names of the columns.
        params: LightGBM's parameters.
        categories: Categorical column -> its categories.
    """
    # With these settings LightGBM uses all rows of the sample, and finds the bins in this worker without connecting to
    # the other workers.
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
