"""Store the categories of categorical columns in the XGBoost model, read them from models of any program, and tell
XGBoost which columns contain codes.

XGBoost itself can store categories, but only for training data in DataFrames, which would need a copy of every batch.
In addition, XGBoost 3.2 confuses categories whose names are not ASCII. shoal therefore trains on category codes and
stores the categories in an attribute of the model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import Categories, from_lists, to_lists
from shoal.errors import DataError

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
    """Read the categories of each categorical column from a model; the result is empty if the model has none.

    A model that shoal did not train has the categories that XGBoost itself has stored, in XGBoost's order.

    Raises:
        DataError: XGBoost has stored the categories wrongly, or with a type that shoal does not support.
    """
    noted = booster.attr(ATTRIBUTE)
    return _stored(booster) if noted is None else from_lists(json.loads(noted))


def columns_of_codes(booster: xgboost.Booster, features: Sequence[str]) -> tuple[str, ...]:
    """Return the categorical columns whose categories a model does not contain, as it was trained on integer codes."""
    known = categories_of(booster)
    types = booster.feature_types or []
    return tuple(name for name, type_ in zip(features, types, strict=False) if type_ == "c" and name not in known)


def _stored(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """Read the categories that XGBoost itself has stored in a model that was trained on a DataFrame."""
    if "c" not in (booster.feature_types or []):
        return {}
    found = booster.get_categories(export_to_arrow=True)
    lists = {}
    for name, values in [] if found is None else found.to_arrow():
        if values is None:
            continue
        # XGBoost 3.2 cuts texts that are not ASCII: it stores the first two of the four bytes of "öö".
        if any(byte >= 0x80 for byte in _text_bytes(values)):
            raise DataError(
                f'the model\'s categories of column "{name}" are not ASCII. XGBoost stores such categories wrongly, '
                "so that they are not known: train the model with shoal (categorical_cols), or on categories of "
                "ASCII characters"
            )
        lists[str(name)] = values.to_pylist()
    return from_lists(lists)


def _text_bytes(values: pa.Array) -> bytes:
    import pyarrow as pa

    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    data = values.buffers()[-1] if is_text else None
    return b"" if data is None else data.to_pybytes()
