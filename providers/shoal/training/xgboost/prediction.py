"""Predicting a dataset in row order, one row group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import xgboost

    from shoal.data.connector import DataConnector


def predict_booster(
    booster: xgboost.Booster,
    connector: DataConnector,
    input_cols: Sequence[str],
    *,
    base_margin_col: str | None = None,
) -> np.ndarray:
    """Predicts every row of a dataset.

    Args:
        booster: The model.
        connector: The rows.
        input_cols: Feature columns, in the order the model was trained with.
        base_margin_col: Column of margins, if it was trained with one.

    Returns:
        float32 ``[rows]``, or ``[rows, classes]`` where the objective gives several values per row, in row order. With
        early stopping, what the best round predicts.

    Raises:
        DataError: If a column is missing or no number.
    """
    import numpy as np

    from shoal.data.checks import validate_columns
    from shoal.data.matrix import to_matrix, to_vector

    extra = () if base_margin_col is None else (base_margin_col,)
    validate_columns(connector, input_cols, extra_cols=extra, allow_all_null=True)
    best = booster.attr("best_iteration")
    rounds = (0, 0) if best is None else (0, int(best) + 1)
    parts = []
    for table in connector.iter_batches(tuple(dict.fromkeys((*input_cols, *extra)))):
        margin = None if base_margin_col is None else to_vector(table, base_margin_col, "float32")
        parts.append(booster.inplace_predict(to_matrix(table, input_cols), iteration_range=rounds, base_margin=margin))
    return np.concatenate(parts)


def features_of(booster: xgboost.Booster) -> list[str]:
    """Names of the columns that a model takes, in its order."""
    return list(booster.feature_names or [])
