"""Load a trained XGBoost model from its bytes, and name its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.training.xgboost.params import native

if TYPE_CHECKING:
    import xgboost

    from shoal.training.boosting.request import TrainResult

FILE_NAME = "model.ubj"
"""Name of the file of a trained model. XGBoost chooses the file's format by the ending of the name."""


def load(trained: TrainResult) -> xgboost.Booster:
    """Load a trained XGBoost model from its bytes, which contain the best round but not the parameters.

    Args:
        trained: Result of the training.

    Returns:
        The booster, with the user's parameters, as ``xgboost.train`` returns it.
    """
    import xgboost

    # The machine that loads the model may have no GPU.
    params = {name: value for name, value in native(trained.params).items() if name != "device"}
    booster = xgboost.Booster(params, model_file=bytearray(trained.model))
    # XGBoost adds the objective's default metric to the booster at the first evaluation, even of no eval set.
    booster.eval_set([])
    return booster
