"""Load a trained LightGBM model from LightGBM's text format, and name its file."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.training.lightgbm.params import objective_of

if TYPE_CHECKING:
    import lightgbm

    from shoal.training.boosting.request import TrainResult

FILE_NAME = "model.txt"
"""Name of the file of a trained model."""


def load(trained: TrainResult) -> lightgbm.Booster:
    """Load a trained LightGBM model from LightGBM's text format, which contains neither the best round nor its score.

    Args:
        trained: Result of the training.

    Returns:
        The booster, with the user's parameters, as ``lightgbm.train`` returns it. After early stopping, the booster
        has only the rounds up to the best round.
    """
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
            booster.best_score[name][metric] = values[-1 if best is None else best]
    booster.params = {**trained.params, **_as_train_sets(booster, trained.params)}
    return booster


def stored_params(booster: lightgbm.Booster) -> dict[str, Any]:
    """Return the parameters of the training from a model's text, with all defaults and under canonical names.

    `booster.params` contain only the user's parameters.

    Args:
        booster: Model that was loaded from its text; ``lightgbm.train`` loads its model from the text, too.
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
