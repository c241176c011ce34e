"""Predicting a dataset in row order, one row group at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.training.lightgbm.params import objective_of

if TYPE_CHECKING:
    import lightgbm
    import numpy as np

    from shoal.data.connector import DataConnector


def predict_booster(
    booster: lightgbm.Booster,
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
        base_margin_col: Column of margins, if it was trained with one; LightGBM's own `predict` knows of none.

    Returns:
        float64 ``[rows]``, or ``[rows, classes]`` where the objective gives several values per row, in row order. With
        early stopping, what the best round predicts.

    Raises:
        DataError: If a column is missing or no number.
    """
    import numpy as np

    from shoal.data.checks import validate_columns
    from shoal.data.matrix import to_matrix, to_vector

    extra = () if base_margin_col is None else (base_margin_col,)
    validate_columns(connector, input_cols, extra_cols=extra, allow_all_null=True)
    parts = []
    for table in connector.iter_batches(tuple(dict.fromkeys((*input_cols, *extra)))):
        rows = to_matrix(table, input_cols)
        if base_margin_col is None:
            parts.append(booster.predict(rows))
        else:
            margin = to_vector(table, base_margin_col, "float32")
            parts.append(_linked(booster.predict(rows, raw_score=True) + margin, booster.params))
    return np.concatenate(parts)


def _linked(score: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """What an objective makes of a raw score."""
    import numpy as np

    linked: np.ndarray = score
    objective = objective_of(params)
    if objective in ("poisson", "gamma", "tweedie"):
        linked = np.exp(score)
    if objective in ("binary", "cross_entropy"):
        steepness = float(params.get("sigmoid", 1.0)) if objective == "binary" else 1.0
        linked = 1 / (1 + np.exp(-steepness * score))
    return linked


def features_of(booster: lightgbm.Booster) -> list[str]:
    """Names of the columns that a model takes, in its order."""
    return list(booster.feature_name())
