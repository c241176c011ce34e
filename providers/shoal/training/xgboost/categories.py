"""Categories in XGBoost: which columns hold codes, and what the codes mean, noted in the model itself.

XGBoost's own memory of categories is filled by DataFrames alone, which would cost a copy of every batch; and 3.2 takes
one category for another where a name is not ASCII.
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
"""Attribute of a model that holds its categories: JSON, column -> list; the code of a category is its place."""


def feature_types(features: Sequence[str], categorical: Collection[str]) -> list[str] | None:
    """XGBoost's types of the columns: "c" for codes, "q" for quantities; None where there are no codes."""
    if not categorical:
        return None
    return ["c" if name in categorical else "q" for name in features]


def note(booster: xgboost.Booster, categories: Categories) -> None:
    """Note the categories in a model; they go with its bytes."""
    if categories:
        booster.set_attr(**{ATTRIBUTE: json.dumps(to_lists(categories))})


def categories_of(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """The categories that a model was trained with, by column."""
    return from_lists(json.loads(booster.attr(ATTRIBUTE) or "{}"))
