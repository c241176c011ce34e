"""Load a trained XGBoost model from its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgboost


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
