"""A LightGBM model and its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightgbm


def load(model: bytes, best_iteration: int | None) -> lightgbm.Booster:
    """Loads a model.

    Args:
        model: Its text.
        best_iteration: Best round, from 0, which the text has no place for; None: all rounds are used.

    Returns:
        The booster; it predicts with the best round, and is saved up to it, as after LightGBM's own early stopping.
    """
    import lightgbm

    booster = lightgbm.Booster(model_str=model.decode())
    if best_iteration is not None:
        booster.best_iteration = best_iteration + 1
    return booster
