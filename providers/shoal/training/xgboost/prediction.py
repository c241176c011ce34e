"""Predict the rows of datasets with trained XGBoost models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.data.matrix import to_matrix
from shoal.training.boosting.prediction import BoosterPredictor
from shoal.training.xgboost.categories import categories_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import xgboost

    from shoal.data.connector import DataConnector


def predict_booster(
    booster: xgboost.Booster,
    connector: DataConnector,
    input_cols: Sequence[str],
    *,
    base_margin_cols: Sequence[str] = (),
) -> np.ndarray:
    """Predict every row of a dataset with an XGBoost model.

    Args:
        booster: Model.
        connector: Dataset to predict; a category that the model does not know counts as a missing value.
        input_cols: Feature columns, in the order of the training.
        base_margin_cols: Columns of margins, one per output, if the model was trained with them.

    Returns:
        Predictions in row order: float32 ``[rows]``, or ``[rows, classes]`` if the objective has several values per
        row. A model that was trained with early stopping predicts with its best round.

    Raises:
        DataError: A column is missing, or is neither numeric nor categorical.
    """
    return predictor(booster, input_cols, base_margin_cols=base_margin_cols).predict_dataset(connector)


def predictor(
    booster: xgboost.Booster, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
) -> BoosterPredictor:
    """Return an object that predicts the rows of tables with a booster; arguments: see :func:`predict_booster`."""
    best = booster.attr("best_iteration")
    rounds = (0, 0) if best is None else (0, int(best) + 1)

    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        matrix = to_matrix(features, features.column_names)
        predicted: np.ndarray = booster.inplace_predict(matrix, iteration_range=rounds, base_margin=margin)
        return predicted

    return BoosterPredictor(predict, tuple(input_cols), categories_of(booster), tuple(base_margin_cols))


def features_of(booster: xgboost.Booster) -> list[str]:
    """Return the names of a model's feature columns, in the model's order."""
    return list(booster.feature_names or [])
