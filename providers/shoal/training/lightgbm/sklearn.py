"""Convert a trained LightGBM booster (model) to LightGBM's scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.training.lightgbm.model import stored_params
from shoal.training.lightgbm.params import RANKING, objective_of

if TYPE_CHECKING:
    import lightgbm

    from shoal.training.boosting.checkpoints import History

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
