"""Store the categories of a training in the XGBoost model, and tell XGBoost which columns contain category codes.

XGBoost can store categories itself, but only from DataFrames, which would cost a copy of every batch. In addition,
XGBoost 3.2 confuses categories whose names are not ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists

if TYPE_CHECKING:
    import pyarrow as pa
    import xgboost

ATTRIBUTE = "shoal.categories"
"""Model attribute with the categories as JSON: column -> list; a category's code is its index in the list."""


def feature_types(features: Sequence[str], categorical: Collection[str]) -> list[str] | None:
    """Return XGBoost's type of each column ("c": category codes, "q": quantities), or None without categories."""
    if not categorical:
        return None
    return ["c" if name in categorical else "q" for name in features]


def note(booster: xgboost.Booster, categories: Categories) -> None:
    """Store the categories in a model; the serialised model contains them."""
    if categories:
        booster.set_attr(**{ATTRIBUTE: json.dumps(to_lists(categories))})


def categories_of(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """Return a dict from each categorical column to the categories seen in training, as stored in the model."""
    return from_lists(json.loads(booster.attr(ATTRIBUTE) or "{}"))
