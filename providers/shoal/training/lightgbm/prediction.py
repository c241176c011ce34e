"""What a LightGBM model says of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.training.boosting.prediction import predict_rows
from shoal.training.lightgbm.categories import categories_of
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
        connector: The rows; a value that is no category of the model counts as missing.
        input_cols: Feature columns, in the order the model was trained with.
        base_margin_col: Column of margins, if it was trained with one; LightGBM's own `predict` knows of none.

    Returns:
        float64 ``[rows]``, or ``[rows, classes]`` where the objective gives several values per row, in row order. With
        early stopping, what the best round predicts.

    Raises:
        DataError: If a column is missing, or neither a number nor a category.
    """

    def predict(features: np.ndarray, margin: np.ndarray | None) -> np.ndarray:
        if margin is None:
            predicted: np.ndarray = booster.predict(features)
            return predicted
        score = booster.predict(features, raw_score=True)
        return _linked(score + (margin if score.ndim == 1 else margin[:, None]), booster.params)

    return predict_rows(predict, connector, input_cols, base_margin_col, categories_of(booster))


def _linked(score: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """What an objective makes of a raw score."""
    import numpy as np

    linked: np.ndarray = score
    objective = objective_of(params)
    if objective in ("poisson", "gamma", "tweedie"):
        linked = np.exp(score)
    if objective == "multiclass":
        likely = np.exp(score - score.max(axis=1, keepdims=True))
        linked = likely / likely.sum(axis=1, keepdims=True)
    if objective in ("binary", "multiclassova", "cross_entropy"):
        steepness = 1.0 if objective == "cross_entropy" else float(params.get("sigmoid", 1.0))
        linked = 1 / (1 + np.exp(-steepness * score))
    return linked


def features_of(booster: lightgbm.Booster) -> list[str]:
    """Names of the columns that a model takes, in its order."""
    return list(booster.feature_name())
