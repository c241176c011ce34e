"""Predict the rows of datasets with trained XGBoost models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.matrix import to_matrix
from shoal.training.boosting.prediction import BoosterPredictor, Output, Predict, class_probabilities
from shoal.training.xgboost.categories import categories_of, columns_of_codes
from shoal.training.xgboost.missing import missing_of
from shoal.training.xgboost.params import outputs_per_label

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import xgboost

    from shoal.data.connector import DataConnector

_CLASSES = ("multi:softmax", "binary:hinge")
"""Objectives whose predictions are numbers of classes and not probabilities."""

_UNBOUNDED = ("rank:", "count:", "survival:", "binary:logitraw", "reg:gamma", "reg:tweedie")
"""Beginnings of the objectives whose predictions are raw scores, counts or times."""


def output_of(params: Mapping[str, Any], *, custom_objective: bool) -> Output:
    """Return the form of the predictions of a model that will be trained with these parameters."""
    objective = "a function" if custom_objective else str(params.get("objective", "reg:squarederror"))
    gives_classes = not custom_objective and objective in _CLASSES
    return Output(
        objective,
        values=1 if gives_classes else outputs_per_label(params),
        classes=max(2, int(params.get("num_class") or 1)),
        gives_classes=gives_classes,
        is_unbounded=custom_objective or objective.startswith(_UNBOUNDED),
    )


def predict_booster(
    booster: xgboost.Booster,
    connector: DataConnector,
    input_cols: Sequence[str],
    *,
    base_margin_cols: Sequence[str] = (),
) -> np.ndarray:
    """Predict every row of a dataset with an XGBoost model.

    Raises:
        DataError: A column is missing, or is neither numeric nor categorical.
    """
    return predictor(booster, input_cols, base_margin_cols=base_margin_cols).predict_dataset(connector)


def predictor(
    model: xgboost.Booster | xgboost.XGBModel, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
) -> BoosterPredictor:
    """Return an object that predicts the rows of tables with a booster or with an estimator such as ``XGBClassifier``.

    A classifier predicts probabilities: of class 1 ``[rows]``, or of each class ``[rows, classes]``. The other
    arguments are those of :func:`predict_booster`.

    Raises:
        DataError: The model's categories are not known.
    """
    booster = _booster(model)
    is_classifier = hasattr(model, "predict_proba")
    objective = json.loads(booster.save_config())["learner"]["objective"]["name"]
    return BoosterPredictor(
        _predict_of_booster(booster) if model is booster else _predict_of_estimator(model),
        tuple(input_cols),
        categories_of(booster),
        tuple(base_margin_cols),
        code_cols=columns_of_codes(booster, input_cols),
        classes=tuple(model.classes_.tolist()) if is_classifier else None,
        # XGBClassifier computes probabilities with multi:softmax, too.
        gives_classes=objective in _CLASSES and not (is_classifier and objective == "multi:softmax"),
    )


def features_of(model: xgboost.Booster | xgboost.XGBModel) -> list[str]:
    """Return the names of a model's feature columns, in the model's order; empty if the model has no names."""
    return list(_booster(model).feature_names or [])


def num_features(model: xgboost.Booster | xgboost.XGBModel) -> int:
    """Return the number of a model's feature columns."""
    return int(_booster(model).num_features())


def _booster(model: Any) -> Any:
    return model.get_booster() if hasattr(model, "get_booster") else model


def _predict_of_booster(booster: xgboost.Booster) -> Predict:
    best = booster.attr("best_iteration")
    rounds = (0, 0) if best is None else (0, int(best) + 1)
    missing = missing_of(booster)

    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        matrix = to_matrix(features, features.column_names)
        predicted: np.ndarray = booster.inplace_predict(
            matrix, iteration_range=rounds, missing=missing, base_margin=margin
        )
        return predicted

    return predict


def _predict_of_estimator(model: Any) -> Predict:
    # The estimator itself predicts, because it has more settings than its booster, such as `missing`.
    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        matrix = to_matrix(features, features.column_names)
        if hasattr(model, "predict_proba"):
            return class_probabilities(model.predict_proba(matrix, base_margin=margin))
        predicted: np.ndarray = model.predict(matrix, base_margin=margin)
        return predicted

    return predict
