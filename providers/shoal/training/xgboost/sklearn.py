"""Convert a trained XGBoost booster (model) to XGBoost's scikit-learn estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.training.xgboost.missing import missing_of
from shoal.training.xgboost.params import native

if TYPE_CHECKING:
    import xgboost

    from shoal.training.boosting.checkpoints import History


def as_sklearn(
    booster: xgboost.Booster, params: Mapping[str, Any], n_estimators: int, eval_results: History
) -> xgboost.XGBModel:
    """Wrap a booster in a fitted scikit-learn estimator."""
    import xgboost

    objective = str(params.get("objective", "reg:squarederror"))
    kinds = {"binary": xgboost.XGBClassifier, "multi": xgboost.XGBClassifier, "rank": xgboost.XGBRanker}
    kind = kinds.get(objective.split(":")[0], xgboost.XGBRegressor)
    settings: dict[str, Any] = {"n_estimators": n_estimators, "objective": objective}
    if not math.isnan(missing := missing_of(booster)):
        settings["missing"] = missing
    model = kind(**{**native(params), **settings})
    # XGBoost has no function that creates an estimator from a booster. `load_model` would lose the booster's
    # parameters, so this code sets the attributes that `fit` would set. The copy keeps `set_params` of the estimator
    # from changing `booster`.
    model._Booster = booster.copy()
    if eval_results:
        model.evals_result_ = eval_results
    if "c" in (booster.feature_types or ()):
        model.enable_categorical = True
    if kind is xgboost.XGBClassifier:
        model.n_classes_ = max(2, int(params.get("num_class", 0)))
    return model
