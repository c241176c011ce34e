"""What an XGBoost model says of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.training.boosting.prediction import predict_rows
from shoal.training.xgboost.categories import categories_of

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
        connector: The rows; a value that is no category of the model counts as missing.
        input_cols: Feature columns, in the order the model was trained with.
        base_margin_col: Column of margins, if it was trained with one.

    Returns:
        float32 ``[rows]``, or ``[rows, classes]`` where the objective gives several values per row, in row order. With
        early stopping, what the best round predicts.

    Raises:
        DataError: If a column is missing, or neither a number nor a category.
    """
    best = booster.attr("best_iteration")
    rounds = (0, 0) if best is None else (0, int(best) + 1)

    def predict(features: np.ndarray, margin: np.ndarray | None) -> np.ndarray:
        predicted: np.ndarray = booster.inplace_predict(features, iteration_range=rounds, base_margin=margin)
        return predicted

    return predict_rows(predict, connector, input_cols, base_margin_col, categories_of(booster))


def features_of(booster: xgboost.Booster) -> list[str]:
    """Names of the columns that a model takes, in its order."""
    return list(booster.feature_names or [])
