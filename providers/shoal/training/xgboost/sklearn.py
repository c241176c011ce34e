"""Convert a trained XGBoost booster (model) to XGBoost's scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xgboost


def as_sklearn(booster: xgboost.Booster, params: Mapping[str, Any]) -> xgboost.XGBModel:
    """Wrap a booster in a fitted scikit-learn estimator.

    Args:
        booster: Model.
        params: Parameters of the training, which become the parameters of the estimator.

    Returns:
        An ``XGBClassifier`` for binary and multi-class objectives (with ``classes_`` 0 to n - 1), an ``XGBRanker`` for
        ranking objectives, or else an ``XGBRegressor``. After early stopping the estimator predicts with the best
        round.
    """
    import xgboost

    objective = str(params.get("objective", "reg:squarederror"))
    kinds = {"binary": xgboost.XGBClassifier, "multi": xgboost.XGBClassifier, "rank": xgboost.XGBRanker}
    kind = kinds.get(objective.split(":")[0], xgboost.XGBRegressor)
    model = kind(**{**params, "n_estimators": booster.num_boosted_rounds(), "objective": objective})
    model.load_model(booster.save_raw("ubj"))
    return model
