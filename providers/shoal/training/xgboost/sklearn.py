"""A trained booster as XGBoost's scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xgboost


def as_sklearn(booster: xgboost.Booster, params: Mapping[str, Any]) -> xgboost.XGBModel:
    """Wraps a booster.

    Args:
        booster: The model.
        params: Parameters that it was trained with; the estimator shows them.

    Returns:
        A fitted ``XGBClassifier`` for binary and multi-class objectives, with ``classes_`` 0 to n - 1, an ``XGBRanker``
        for rank objectives, else an ``XGBRegressor``. Like any of them, it predicts with the best round if there was
        early stopping.
    """
    import xgboost

    objective = str(params.get("objective", "reg:squarederror"))
    kinds = {"binary": xgboost.XGBClassifier, "multi": xgboost.XGBClassifier, "rank": xgboost.XGBRanker}
    kind = kinds.get(objective.split(":")[0], xgboost.XGBRegressor)
    model = kind(**{**params, "n_estimators": booster.num_boosted_rounds(), "objective": objective})
    model.load_model(booster.save_raw("ubj"))
    return model
