"""Store the categories of a training's categorical columns in the LightGBM model.

LightGBM itself stores categories only if it is trained on a DataFrame. shoal trains on arrays, and stores the
categories in the format of LightGBM: the last line of the model's text contains the categories of each categorical
column. LightGBM's own `predict` therefore can encode the categorical columns of a DataFrame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists
from shoal.training.lightgbm.model import stored_params

if TYPE_CHECKING:
    import lightgbm
    import pyarrow as pa


def note(dataset: lightgbm.Dataset, categories: Categories) -> None:
    """Store the categories of categorical columns in a dataset. Models and other datasets that use this dataset inherit
    the categories.

    Args:
        dataset: Dataset to change.
        categories: Column -> categories, in the order of the dataset's columns.
    """
    if categories:
        dataset.pandas_categorical = list(to_lists(categories).values())


def categories_of(booster: lightgbm.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model.

    Args:
        booster: Model that was loaded from its text.
    """
    lists = booster.pandas_categorical or []
    columns = stored_params(booster).get("categorical_feature")
    if not lists or not isinstance(columns, list) or len(columns) != len(lists):
        # The model has no categories, or was trained on category codes that the user had computed.
        return {}
    names = booster.feature_name()
    return from_lists({names[column]: values for column, values in zip(columns, lists, strict=True)})
