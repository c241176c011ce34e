"""Append the predictions of a batch prediction to its rows, as one or several new columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def with_predictions(table: pa.Table, predicted: np.ndarray, column: str) -> pa.Table:
    """Append predictions to a table, as one column, or as several columns if the model returns several values per row.

    Args:
        table: Table with the other columns of the output, which may have no columns.
        predicted: Predictions ``[rows]`` or ``[rows, outputs]``; one output per row gives one column.
        column: Name of the new column; several new columns get this name with a number.
    """
    import pyarrow as pa

    flat = predicted.reshape(len(predicted), -1)
    names = [column] if flat.shape[1] == 1 else [f"{column}_{number}" for number in range(flat.shape[1])]
    if clash := sorted(set(names) & set(table.column_names)):
        raise DataError(f'the dataset already has a column "{clash[0]}": choose another prediction_col')
    for name, values in zip(names, flat.T, strict=True):
        array = pa.array(values)
        table = table.append_column(name, array) if table.num_columns else pa.table({name: array})
    return table
