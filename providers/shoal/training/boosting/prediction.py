"""Predict a dataset in row order, one row group at a time, with a model of any library."""

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
    """Predict every row of a dataset.

    Args:
        predict: Function that predicts a batch. Its arguments are the features (float32 ``[rows, columns]``) and the
            margins (float32 ``[rows]`` or None); it returns predictions (``[rows]`` or ``[rows, classes]``).
        connector: Dataset to predict.
        input_cols: Feature columns, in the order of the training.
        base_margin_col: Column of margins, if the model was trained with one.
        categories: Categories of the training set, by column; any other value counts as missing.

    Returns:
        Predictions in row order, ``[rows]`` or ``[rows, classes]``.

    Raises:
        DataError: A column is missing, or is neither numeric nor categorical.
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
