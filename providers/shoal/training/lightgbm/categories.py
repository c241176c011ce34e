"""Store the categories of a training's categorical columns in the LightGBM model.

LightGBM itself stores categories only if it is trained on a DataFrame. shoal trains on arrays, and stores the
categories in the format of LightGBM: the last line of the model's text contains the categories of each categorical
column. LightGBM's own `predict` therefore can encode the categorical columns of a DataFrame.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists
from shoal.errors import DataError

if TYPE_CHECKING:
    import lightgbm
    import pyarrow as pa


def note(dataset: lightgbm.Dataset, categories: Categories) -> None:
    """Store the categories of categorical columns in a dataset. Models and other datasets that use this dataset inherit
    the categories.
    """
    if categories:
        dataset.pandas_categorical = list(to_lists(categories).values())


def categories_of(booster: lightgbm.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model; the result is empty if the model has none.

    LightGBM stores the categories of the columns with pandas' categorical type without the columns' names. These are
    the model's categorical columns, unless the program that trained the model used ordered categories or named other
    columns in `categorical_feature`.

    Raises:
        DataError: It is not known which columns the categories belong to, or their type is not supported.
    """
    lists = booster.pandas_categorical or []
    if not lists:
        return {}
    columns, ranges = _categorical_columns(booster)
    if len(columns) != len(lists) or any(
        max(_codes(ranges[column]), default=0) >= len(values) for column, values in zip(columns, lists, strict=True)
    ):
        raise DataError(
            f"the model has {len(lists)} lists of categories and {len(columns)} categorical columns that do not belong "
            "together, so the codes of the categories are not known: train the model with shoal (categorical_cols), or "
            "in LightGBM with unordered categories and without the argument categorical_feature"
        )
    names = booster.feature_name()
    return from_lists({names[column]: values for column, values in zip(columns, lists, strict=True)})


def columns_of_codes(booster: lightgbm.Booster, features: Sequence[str]) -> tuple[str, ...]:
    """Return the categorical columns whose categories a model does not contain, as it was trained on integer codes."""
    if booster.pandas_categorical:
        return ()
    return tuple(features[column] for column in _categorical_columns(booster)[0])


def _categorical_columns(booster: lightgbm.Booster) -> tuple[list[int], list[str]]:
    """Return the numbers of a model's categorical columns, and the description of each column's values in the model's
    text: ``[smallest:largest]`` of a numeric column, ``code:code:...`` of a categorical one, or ``none``."""
    # The text is used, because `booster.params` lacks the columns if the booster was in a pickled estimator.
    text = booster.model_to_string(num_iteration=1)
    [ranges] = re.findall(r"^feature_infos=(.*)$", text, re.MULTILINE)
    listed = re.search(r"^\[categorical_feature: ([\d,]*)\]$", text, re.MULTILINE)
    named = {int(number) for number in listed[1].split(",") if number} if listed else set()
    infos = ranges.split(" ")
    seen = {number for number, info in enumerate(infos) if info != "none" and not info.startswith("[")}
    return sorted(named | seen), infos


def _codes(values: str) -> list[int]:
    return [] if values == "none" or values.startswith("[") else [int(code) for code in values.split(":")]
