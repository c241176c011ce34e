"""Predicting a dataset in row order, one row group at a time, whichever library made the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.data.categories import Categories, encoded

if TYPE_CHECKING:
    import numpy as np

    from shoal.data.connector import DataConnector


def predict_rows(
    predict: Callable[[np.ndarray, np.ndarray | None], np.ndarray],
    connector: DataConnector,
    input_cols: Sequence[str],
    base_margin_col: str | None,
    categories: Categories,
) -> np.ndarray:
    """Predicts every row of a dataset.

    Args:
        predict: What a model says of some rows: features float32 ``[rows, columns]`` and margins float32 ``[rows]``, if
            there are any, to predictions ``[rows]`` or ``[rows, classes]``.
        connector: The rows.
        input_cols: Feature columns, in the order the model was trained with.
        base_margin_col: Column of margins, if it was trained with one.
        categories: Those of the training set; any other value is a missing one.

    Returns:
        ``[rows]`` or ``[rows, classes]``, in row order.

    Raises:
        DataError: If a column is missing, or neither a number nor a category.
    """
    import numpy as np

    from shoal.data.checks import check_categories, validate_columns
    from shoal.data.matrix import to_matrix, to_vector

    extra = () if base_margin_col is None else (base_margin_col,)
    validate_columns(
        connector.source, input_cols, extra_cols=extra, categorical_cols=tuple(categories), allow_all_null=True
    )
    check_categories(connector.source, {name: values.type for name, values in categories.items()})
    parts = []
    for table in connector.iter_batches(tuple(dict.fromkeys((*input_cols, *extra)))):
        margin = None if base_margin_col is None else to_vector(table, base_margin_col, "float32")
        parts.append(predict(to_matrix(encoded(table, categories), input_cols), margin))
    return np.concatenate(parts)
