"""A trained booster as LightGBM's scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.training.lightgbm.params import RANKING, objective_of

if TYPE_CHECKING:
    import lightgbm

_CLASSIFYING = ("binary", "multiclass", "multiclassova")
# Parameters that are arguments of the estimator, and go by its names.
_SHOWN_AS = {"seed": "random_state", "boosting": "boosting_type", "num_threads": "n_jobs"}


def as_sklearn(booster: lightgbm.Booster, params: Mapping[str, Any]) -> lightgbm.LGBMModel:
    """Wraps a booster.

    Args:
        booster: The model.
        params: Parameters that it was trained with; the estimator shows them.

    Returns:
        A fitted ``LGBMClassifier`` for binary and multi-class objectives, with ``classes_`` 0 to n - 1, an
        ``LGBMRanker`` for those that rank, else an ``LGBMRegressor``, which of a model with a custom objective gives
        the raw scores. Like any of them, it predicts with the best round if there was early stopping.
    """
    import lightgbm
    from sklearn.preprocessing import LabelEncoder

    # A custom objective has no name among the parameters, but the model knows that there was one.
    objective = "none" if objective_of(booster.params) == "none" else objective_of(params)
    kind = lightgbm.LGBMClassifier if objective in _CLASSIFYING else lightgbm.LGBMRegressor
    if objective in RANKING:
        kind = lightgbm.LGBMRanker
    shown = {name: value for name, value in params.items() if name not in _SHOWN_AS}
    renamed = {ours: params[theirs] for theirs, ours in _SHOWN_AS.items() if theirs in params}
    model = kind(**{**shown, **renamed, "n_estimators": booster.current_iteration(), "objective": objective})
    # What `fit` leaves behind: LightGBM has no way to make an estimator of a booster.
    model._Booster = booster
    model._best_iteration = booster.best_iteration
    model._n_features = booster.num_feature()
    model.fitted_ = True
    if kind is lightgbm.LGBMClassifier:
        model._n_classes = max(2, booster.num_model_per_iteration())
        model._le = LabelEncoder().fit(range(model._n_classes))
        model._classes = model._le.classes_
    return model
