"""Categories in LightGBM: noted in the model as if they came from a DataFrame, the one way it has for them.

The last line of a model's text lists the categories of each such column, and LightGBM's own `predict` encodes the
category columns of a DataFrame by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists

if TYPE_CHECKING:
    import lightgbm
    import pyarrow as pa


def note(dataset: lightgbm.Dataset, categories: Categories) -> None:
    """Note the categories in a dataset, for those that refer to it and for the models trained on them.

    Args:
        dataset: The dataset.
        categories: Of its columns, in their order.
    """
    if categories:
        dataset.pandas_categorical = list(to_lists(categories).values())


def categories_of(booster: lightgbm.Booster) -> dict[str, pa.Array]:
    """The categories that a model was trained with, by column.

    Args:
        booster: A model that was loaded from its text.
    """
    lists = booster.pandas_categorical or []
    columns = booster.params.get("categorical_feature")
    if not lists or not isinstance(columns, list) or len(columns) != len(lists):
        return {}  # it was trained on codes that its user made
    names = booster.feature_name()
    return from_lists({names[column]: values for column, values in zip(columns, lists, strict=True)})
