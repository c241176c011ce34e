"""A trained LightGBM model: its file, its categories, its predictions, its scikit-learn estimator, and the model from
which a training continues.

LightGBM itself stores categories only if it is trained on a DataFrame. shoal trains on arrays, and stores the
categories in the format of LightGBM: the last line of the model's text contains the categories of each categorical
column. LightGBM's own `predict` therefore can encode the categorical columns of a DataFrame.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.matrix import Categories, from_lists, to_lists, to_matrix
from shoal.errors import DataError, InvalidArgumentError
from shoal.training.boosting.model import BoosterPredictor, InitModel, Output, Predict, class_probabilities
from shoal.training.boosting.model_format import why_unreadable
from shoal.training.lightgbm.params import RANKING, merge_params, objective_of, own_message

if TYPE_CHECKING:
    import lightgbm
    import numpy as np
    import pyarrow as pa

    from shoal.training.boosting.messages import History
    from shoal.training.boosting.request import TrainResult

FILE_NAME = "model.txt"
"""Name of the file of a trained model."""


def load(trained: TrainResult) -> lightgbm.Booster:
    """Load a trained model from LightGBM's text format, which contains neither the best round nor its score."""
    import lightgbm

    booster = lightgbm.Booster(model_str=trained.model.decode())
    best = trained.best_iteration
    if best is not None and best + 1 < booster.current_iteration():
        booster.model_from_string(booster.model_to_string(num_iteration=best + 1))
    # Without this call, eval_valid() and eval_train() would raise AttributeError.
    booster.free_dataset()
    booster.best_iteration = 0 if best is None else best + 1
    booster.best_score = defaultdict(OrderedDict)
    for name, metrics in trained.eval_results.items():
        for metric, values in metrics.items():
            booster.best_score[name][metric] = values[trained.final_round]
    booster.params = {**trained.params, **_as_train_sets(booster, trained.params)}
    return booster


def stored_params(booster: lightgbm.Booster) -> dict[str, Any]:
    """Return the parameters of the training from a model's text, with all defaults and under canonical names.

    `booster.params` contain only the user's parameters.
    """
    stored: dict[str, Any] = booster._get_loaded_param()
    return stored


def _as_train_sets(booster: lightgbm.Booster, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that ``lightgbm.train`` adds to the user's parameters."""
    stored = stored_params(booster)
    objective = "none" if objective_of(stored) == "none" else params.get("objective")
    added = {"objective": objective, "num_iterations": stored["num_iterations"]}
    categorical = stored.get("categorical_feature")
    return {**added, "categorical_column": categorical} if categorical and booster.pandas_categorical else added


def serialised(model: Any) -> bytes:
    """Return a booster, or the booster of a scikit-learn estimator, as bytes.

    Raises:
        InvalidArgumentError: It is no model of LightGBM.
    """
    import lightgbm

    booster = _booster(model)
    if not isinstance(booster, lightgbm.Booster):
        raise InvalidArgumentError(
            f"LightGBM cannot continue from a {type(model).__module__}.{type(model).__name__}: pass a "
            "lightgbm.Booster, a LightGBM estimator that is fitted, the path of a model file, or an MLflow URI"
        )
    text: str = booster.model_to_string(num_iteration=-1)
    return text.encode()


def init_model(content: bytes) -> InitModel:
    """Read a model from which a training continues; see :meth:`InitModel.read`."""
    import lightgbm

    if (why := why_unreadable("lightgbm", content)) is not None:
        raise InvalidArgumentError(f"LightGBM cannot load init_model: {why}")
    try:
        text = content.decode()
        booster = lightgbm.Booster(model_str=text)
    except (lightgbm.basic.LightGBMError, ValueError) as error:  # the text is no UTF-8, or its last line no JSON
        raise InvalidArgumentError(
            f"LightGBM cannot load init_model: {own_message(error)}. Use a model that LightGBM has written"
        ) from error
    return InitModel(
        content=content,
        rounds=booster.current_iteration(),
        features=tuple(features_of(booster)),
        num_features=booster.num_feature(),
        categories=categories_of(booster),
        # Splits of categories are sets of codes, and the parameter categorical_feature is for columns of such codes.
        code_cols=(),
        objective=objective_line(booster),
        outputs=booster.num_model_per_iteration(),
        # The text has the same format for all kinds of boosting except random forests.
        booster="rf" if re.search("^average_output$", text, re.MULTILINE) else "gbdt",
    )


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


def predictor(
    model: lightgbm.Booster | lightgbm.LGBMModel, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
) -> BoosterPredictor:
    """Return an object that predicts the rows of tables with a booster or with an estimator such as ``LGBMClassifier``.

    A classifier predicts probabilities: of class 1 ``[rows]``, or of each class ``[rows, classes]``.

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


def note(dataset: lightgbm.Dataset, categories: Categories) -> None:
    """Store the categories of categorical columns in a dataset. Models and other datasets that use this dataset inherit
    the categories.
    """
    if categories:
        dataset.pandas_categorical = list(to_lists(categories).values())


def categories_of(booster: lightgbm.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model; the result is empty if the model has none.

    LightGBM stores the categories of the columns with pandas' categorical type without the columns' names. These are
    the model's categorical columns, unless the program that trained the model used ordered categories or named other
    columns in `categorical_feature`.

    Raises:
        DataError: It is not known which columns the categories belong to, or their type is not supported.
    """
    lists = booster.pandas_categorical or []
    if not lists:
        return {}
    columns, ranges = _categorical_columns(booster)
    if len(columns) != len(lists) or any(
        max(_codes(ranges[column]), default=0) >= len(values) for column, values in zip(columns, lists, strict=True)
    ):
        raise DataError(
            f"the model has {len(lists)} lists of categories and {len(columns)} categorical columns that do not belong "
            "together, so the codes of the categories are not known: train the model with shoal (categorical_cols), or "
            "in LightGBM with unordered categories and without the argument categorical_feature"
        )
    names = booster.feature_name()
    return from_lists({names[column]: values for column, values in zip(columns, lists, strict=True)})


def columns_of_codes(booster: lightgbm.Booster, features: Sequence[str]) -> tuple[str, ...]:
    """Return the categorical columns whose categories a model does not contain, as it was trained on integer codes."""
    if booster.pandas_categorical:
        return ()
    return tuple(features[column] for column in _categorical_columns(booster)[0])


def _categorical_columns(booster: lightgbm.Booster) -> tuple[list[int], list[str]]:
    """Return the numbers of a model's categorical columns, and the description of each column's values in the model's
    text: ``[smallest:largest]`` of a numeric column, ``code:code:...`` of a categorical one, or ``none``."""
    # The text is used, because `booster.params` lacks the columns if the booster was in a pickled estimator.
    text = booster.model_to_string(num_iteration=1)
    [ranges] = re.findall(r"^feature_infos=(.*)$", text, re.MULTILINE)
    listed = re.search(r"^\[categorical_feature: ([\d,]*)\]$", text, re.MULTILINE)
    named = {int(number) for number in listed[1].split(",") if number} if listed else set()
    infos = ranges.split(" ")
    seen = {number for number, info in enumerate(infos) if info != "none" and not info.startswith("[")}
    return sorted(named | seen), infos


def _codes(values: str) -> list[int]:
    return [] if values == "none" or values.startswith("[") else [int(code) for code in values.split(":")]


_CLASSIFYING = ("binary", "multiclass", "multiclassova")
# LightGBM's parameter -> name of the corresponding argument of the scikit-learn estimator.
_SHOWN_AS = {"seed": "random_state", "boosting": "boosting_type", "num_threads": "n_jobs"}


def as_sklearn(
    booster: lightgbm.Booster, params: Mapping[str, Any], n_estimators: int, eval_results: History
) -> lightgbm.LGBMModel:
    """Wrap a booster in a fitted scikit-learn estimator."""
    import lightgbm
    from sklearn.preprocessing import LabelEncoder

    # If the objective is a function, `params` contain no objective, and the stored objective is "none".
    objective = "none" if objective_of(stored_params(booster)) == "none" else objective_of(params)
    kind = lightgbm.LGBMClassifier if objective in _CLASSIFYING else lightgbm.LGBMRegressor
    if objective in RANKING:
        kind = lightgbm.LGBMRanker
    shown = {name: value for name, value in params.items() if name not in _SHOWN_AS}
    renamed = {ours: params[theirs] for theirs, ours in _SHOWN_AS.items() if theirs in params}
    model = kind(**{**shown, **renamed, "n_estimators": n_estimators, "objective": objective})
    # LightGBM has no function that creates an estimator from a booster, so this code sets the attributes that `fit`
    # would set.
    model._Booster = booster
    model._best_iteration = booster.best_iteration
    model._best_score = booster.best_score
    model._evals_result = eval_results
    model._n_features = model._n_features_in = booster.num_feature()
    model._fitted_with_feature_names = True
    model.fitted_ = True
    if kind is lightgbm.LGBMClassifier:
        model._n_classes = max(2, booster.num_model_per_iteration())
        model._le = LabelEncoder().fit(range(model._n_classes))
        model._classes = model._le.classes_
        model._class_map = dict(zip(model._classes, model._classes, strict=True))
    return model
