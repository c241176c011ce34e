"""Store the value that counts as missing in the XGBoost model, and read it from models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xgboost

ATTRIBUTE = "shoal.missing"
"""Name of the model attribute that contains the value of the features that counts as missing, besides NaN."""


def note_missing(booster: xgboost.Booster, missing: float | None) -> None:
    """Store the value that counts as missing in an attribute of a model, so that predictions use it."""
    if missing is not None:
        booster.set_attr(**{ATTRIBUTE: repr(missing)})


def missing_of(booster: xgboost.Booster) -> float:
    """Return the value of the features that counts as missing, besides NaN; NaN if a model has no such value."""
    noted = booster.attr(ATTRIBUTE)
    return math.nan if noted is None else float(noted)
