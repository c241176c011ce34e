"""Load a trained LightGBM model from LightGBM's text format, and name its file; read a model from which a training
continues."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.init_model import InitModel
from shoal.training.lightgbm.categories import categories_of
from shoal.training.lightgbm.params import objective_of, own_message
from shoal.training.lightgbm.prediction import features_of, objective_line

if TYPE_CHECKING:
    import lightgbm

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

    booster = model.booster_ if hasattr(model, "booster_") else model
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

    try:
        text = content.decode()
        booster = lightgbm.Booster(model_str=text)
    except (lightgbm.basic.LightGBMError, UnicodeDecodeError) as error:
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
