"""Store the categories of categorical columns in the XGBoost model, and tell XGBoost which columns contain codes.

XGBoost itself can store categories, but only for training data in DataFrames, which would need a copy of every batch.
In addition, XGBoost 3.2 confuses categories whose names are not ASCII. shoal therefore trains on category codes and
stores the categories in an attribute of the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists

if TYPE_CHECKING:
    import pyarrow as pa
    import xgboost

    from shoal.training.boosting.rows import Columns

ATTRIBUTE = "shoal.categories"
"""Name of the model attribute that contains the categories as JSON: column -> list of its categories. The code of a
category is its index in this list."""


def feature_types(features: Sequence[str], categorical: Collection[str]) -> list[str]:
    """Return XGBoost's feature type of each column: "c" for category codes, "q" for numbers."""
    return ["c" if name in categorical else "q" for name in features]


def stored_types(columns: Columns) -> list[str]:
    """Return the type of each column that XGBoost stores in a model that is trained on a table with these columns."""
    types = (columns.types.get(name, "") for name in columns.features)
    numbers = ("int" if "int" in type_ else "i" if type_ == "bool" else "float" for type_ in types)
    return [
        "c" if name in columns.categories else number for name, number in zip(columns.features, numbers, strict=True)
    ]


def note(booster: xgboost.Booster, categories: Categories) -> None:
    """Store the categories of categorical columns in an attribute of a model, so that the saved model contains the
    categories."""
    if categories:
        booster.set_attr(**{ATTRIBUTE: json.dumps(to_lists(categories))})


def categories_of(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model; the result is empty if the model has none."""
    return from_lists(json.loads(booster.attr(ATTRIBUTE) or "{}"))
