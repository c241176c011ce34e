"""Load a trained XGBoost model from its bytes, and name its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgboost

FILE_NAME = "model.ubj"
"""Name of the file of a trained model. XGBoost chooses the file's format by the ending of the name."""


def load(model: bytes, best_iteration: int | None) -> xgboost.Booster:
    """Load a trained XGBoost model from its bytes.

    Args:
        model: Model as UBJSON.
        best_iteration: Not used, because XGBoost stores the best round in the model itself.

    Returns:
        The booster.
    """
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(bytearray(model))
    return booster
