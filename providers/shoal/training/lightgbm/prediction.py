"""Predict the rows of datasets with trained LightGBM models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.training.boosting.prediction import BoosterPredictor, Predict, class_probabilities
from shoal.training.lightgbm.categories import categories_of, columns_of_codes
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
    """Predict every row of a dataset with a LightGBM model.

    Args:
        booster: Model.
        connector: Dataset to predict; a category that the model does not know counts as a missing value.
        input_cols: Feature columns, in the order of the training.
        base_margin_col: Column of margins, if the model was trained with one. LightGBM's own `predict` does not
            support margins.

    Returns:
        Predictions in row order: float64 ``[rows]``, or ``[rows, classes]`` if the objective has several values per
        row. A model that was trained with early stopping predicts with its best round.

    Raises:
        DataError: A column is missing, or is neither numeric nor categorical.
    """
    return predictor(booster, input_cols, base_margin_col=base_margin_col).predict_dataset(connector)


def predictor(
    model: lightgbm.Booster | lightgbm.LGBMModel, input_cols: Sequence[str], *, base_margin_col: str | None = None
) -> BoosterPredictor:
    """Return an object that predicts the rows of tables with a booster or with an estimator such as ``LGBMClassifier``.

    A classifier predicts probabilities: of class 1 ``[rows]``, or of each class ``[rows, classes]``. The other
    arguments are those of :func:`predict_booster`.

    Raises:
        DataError: The model's categories are not known.
    """
    booster = _booster(model)
    classes = getattr(model, "classes_", None) if hasattr(model, "predict_proba") else None
    return BoosterPredictor(
        _predict_of_booster(booster) if model is booster else _predict_of_estimator(model),
        tuple(input_cols),
        categories_of(booster),
        base_margin_col,
        code_cols=columns_of_codes(booster, input_cols),
        classes=None if classes is None else tuple(classes.tolist()),
    )


def _booster(model: Any) -> Any:
    return model.booster_ if hasattr(model, "booster_") else model


def _predict_of_estimator(model: Any) -> Predict:
    # The estimator itself predicts, because it has more settings than its booster.
    def predict(features: np.ndarray, margin: np.ndarray | None) -> np.ndarray:
        with warnings.catch_warnings():
            # scikit-learn warns that an array has no names of columns. The columns are in the model's order.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            if hasattr(model, "predict_proba"):
                return class_probabilities(model.predict_proba(features))
            predicted: np.ndarray = model.predict(features)
            return predicted

    return predict


def _predict_of_booster(booster: lightgbm.Booster) -> Predict:
    def predict(features: np.ndarray, margin: np.ndarray | None) -> np.ndarray:
        if margin is None:
            predicted: np.ndarray = booster.predict(features)
            return predicted
        score = booster.predict(features, raw_score=True)
        return _predictions(score + (margin if score.ndim == 1 else margin[:, None]), booster.params)

    return predict


def _predictions(score: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """Convert raw scores to predictions, as LightGBM does for the objective in `params`."""
    import numpy as np

    predictions: np.ndarray = score
    objective = objective_of(params)
    if objective in ("poisson", "gamma", "tweedie"):
        predictions = np.exp(score)
    if objective == "multiclass":
        likely = np.exp(score - score.max(axis=1, keepdims=True))
        predictions = likely / likely.sum(axis=1, keepdims=True)
    if objective in ("binary", "multiclassova", "cross_entropy"):
        steepness = 1.0 if objective == "cross_entropy" else float(params.get("sigmoid", 1.0))
        predictions = 1 / (1 + np.exp(-steepness * score))
    return predictions


def features_of(model: lightgbm.Booster | lightgbm.LGBMModel) -> list[str]:
    """Return the names of a model's feature columns, in the model's order; empty if the model has no names."""
    names = list(_booster(model).feature_name())
    # LightGBM numbers the columns of an array in this way.
    return [] if names == [f"Column_{number}" for number in range(len(names))] else names


def num_features(model: lightgbm.Booster | lightgbm.LGBMModel) -> int:
    """Return the number of a model's feature columns."""
    return int(_booster(model).num_feature())
