"""Predict the rows of datasets with trained LightGBM models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.matrix import to_matrix
from shoal.training.boosting.prediction import BoosterPredictor, Output, Predict, class_probabilities
from shoal.training.lightgbm.categories import categories_of, columns_of_codes
from shoal.training.lightgbm.params import RANKING, merge_params, objective_of

if TYPE_CHECKING:
    import lightgbm
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector

# Number of values that are converted to float64 together: 4 MiB, or 16 k rows of 32 columns. In a table with many
# columns a slice has at least `_SLICE_ROWS` rows, because each column of a slice has a fixed cost.
_SLICE_VALUES = 2**19
_SLICE_ROWS = 1_024

_UNBOUNDED = (*RANKING, "poisson", "gamma", "tweedie", "cross_entropy_lambda")
"""Objectives whose predictions are raw scores, counts or other numbers without an upper bound."""


def output_of(params: Mapping[str, Any], *, custom_objective: bool) -> Output:
    """Return the form of the predictions of a model that will be trained with these parameters."""
    objective = "a function" if custom_objective else objective_of(merge_params(params, None, 1))
    classes = int(params.get("num_class") or params.get("num_classes") or 1)
    is_unbounded = custom_objective or objective in _UNBOUNDED
    return Output(objective, values=classes, classes=max(2, classes), is_unbounded=is_unbounded)


def predict_booster(
    booster: lightgbm.Booster,
    connector: DataConnector,
    input_cols: Sequence[str],
    *,
    base_margin_cols: Sequence[str] = (),
) -> np.ndarray:
    """Predict every row of a dataset with a LightGBM model.

    Raises:
        DataError: A column is missing, or is neither numeric nor categorical.
    """
    return predictor(booster, input_cols, base_margin_cols=base_margin_cols).predict_dataset(connector)


def predictor(
    model: lightgbm.Booster | lightgbm.LGBMModel, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
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
        tuple(base_margin_cols),
        code_cols=columns_of_codes(booster, input_cols),
        classes=None if classes is None else tuple(classes.tolist()),
    )


def _booster(model: Any) -> Any:
    return model.booster_ if hasattr(model, "booster_") else model


def _predict_of_estimator(model: Any) -> Predict:
    # The estimator itself predicts, because it has more settings than its booster.
    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        with warnings.catch_warnings():
            # scikit-learn warns that an array has no names of columns. The columns are in the model's order.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            if hasattr(model, "predict_proba"):
                return class_probabilities(predict_table(model.predict_proba, features))
            return predict_table(model.predict, features)

    return predict


def _predict_of_booster(booster: lightgbm.Booster) -> Predict:
    objective = objective_line(booster)

    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        if margin is None:
            return predict_table(booster.predict, features)
        score = predict_table(booster.predict, features, raw_score=True)
        return converted(score + margin, objective)

    return predict


def predict_table(predict: Callable[..., np.ndarray], features: pa.Table, **options: Any) -> np.ndarray:
    """Predict the rows of a table, in float64 as LightGBM reads features, and in slices to limit the memory."""
    import numpy as np

    names = features.column_names
    size = slice_rows(len(features), len(names))
    slices = [features.slice(start, size) for start in range(0, max(1, len(features)), size)]
    return np.concatenate([predict(to_matrix(rows, names, "float64"), **options) for rows in slices])


def slice_rows(rows: int, columns: int) -> int:
    """Return how many rows to convert to float64 at a time: slices of about equal size, of 4 MiB or 1,024 rows."""
    most = max(_SLICE_ROWS, _SLICE_VALUES // columns)
    return max(1, math.ceil(rows / math.ceil(rows / most))) if rows else 1


def converted(score: np.ndarray, objective: str) -> np.ndarray:
    """Convert raw scores to predictions, as LightGBM's objective does."""
    import numpy as np

    name, *options = objective.split() or [""]
    predictions: np.ndarray = score
    if name in ("poisson", "gamma", "tweedie"):
        predictions = np.exp(score)
    elif name == "multiclass":
        likely = np.exp(score - score.max(axis=1, keepdims=True))
        predictions = likely / likely.sum(axis=1, keepdims=True)
    elif name in ("binary", "multiclassova", "cross_entropy"):
        steepness = next((float(each.removeprefix("sigmoid:")) for each in options if each.startswith("sigmoid:")), 1.0)
        predictions = 1 / (1 + np.exp(-steepness * score))
    elif name == "cross_entropy_lambda":
        predictions = np.log1p(np.exp(score))
    elif "sqrt" in options:
        predictions = np.sign(score) * score * score
    return predictions


def objective_line(booster: lightgbm.Booster) -> str:
    """Return the objective as the text of a model describes it; empty if the objective was a function."""
    lines = booster.model_to_string(num_iteration=1).splitlines()
    return next((line.removeprefix("objective=") for line in lines if line.startswith("objective=")), "")


def features_of(model: lightgbm.Booster | lightgbm.LGBMModel) -> list[str]:
    """Return the names of a model's feature columns, in the model's order; empty if the model has no names."""
    names = list(_booster(model).feature_name())
    # LightGBM numbers the columns of an array in this way.
    return [] if names == [f"Column_{number}" for number in range(len(names))] else names


def num_features(model: lightgbm.Booster | lightgbm.LGBMModel) -> int:
    """Return the number of a model's feature columns."""
    return int(_booster(model).num_feature())
