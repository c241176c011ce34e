"""Choose the columns of a batch prediction's output: columns of the dataset, and one or several new columns with the
predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.data.checks import check_same_schema
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector
    from shoal.jobs.specs.prediction import PredictJobSpec


def kept_columns(spec: PredictJobSpec, connector: DataConnector) -> tuple[str, ...]:
    """Return the columns of the dataset that are copied to the output: `keep_cols` of the spec, or all columns.

    Raises:
        DataError: The dataset does not have a column of `keep_cols`, or its files have different types for a column.
        InvalidArgumentError: The column of the predictions would have the name of one of these columns.
    """
    names = connector.schema().names
    if spec.keep_cols is None:
        keep = tuple(names)
    elif missing := sorted(set(spec.keep_cols) - set(names)):
        raise DataError(
            f"keep_cols names columns that the dataset does not have: {', '.join(missing)}. Correct or remove these "
            "names"
        )
    else:
        keep = spec.keep_cols
    if spec.prediction_col in keep:
        raise InvalidArgumentError(
            f'the dataset has a column "{spec.prediction_col}", and prediction_col has the same name: choose another '
            "prediction_col, or leave the column out of keep_cols"
        )
    check_same_schema(connector.source, keep)
    return keep


def with_predictions(table: pa.Table, predicted: np.ndarray, column: str) -> pa.Table:
    """Append predictions to a table, as one column, or several if the model returns several values per row."""
    import pyarrow as pa

    flat = predicted.reshape(len(predicted), -1)
    names = [column] if flat.shape[1] == 1 else [f"{column}_{number}" for number in range(flat.shape[1])]
    if clash := sorted(set(names) & set(table.column_names)):
        raise DataError(f'the dataset already has a column "{clash[0]}": choose another prediction_col')
    for name, values in zip(names, flat.T, strict=True):
        array = pa.array(values)
        table = table.append_column(name, array) if table.num_columns else pa.table({name: array})
    return table
