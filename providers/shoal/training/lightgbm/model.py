"""Load a trained LightGBM model from LightGBM's text format, and name its file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightgbm

FILE_NAME = "model.txt"
"""Name of the file of a trained model."""


def load(model: bytes, best_iteration: int | None) -> lightgbm.Booster:
    """Load a trained LightGBM model from LightGBM's text format.

    Args:
        model: Model in LightGBM's text format, encoded as UTF-8.
        best_iteration: Best round, from 0, because the text format does not contain it; None: use all rounds.

    Returns:
        The booster, which predicts with the rounds up to the best round and saves only these rounds, like a booster
        after LightGBM's own early stopping.
    """
    import lightgbm

    booster = lightgbm.Booster(model_str=model.decode())
    if best_iteration is not None:
        booster.best_iteration = best_iteration + 1
    return booster
