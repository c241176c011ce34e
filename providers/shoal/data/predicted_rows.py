"""Rows of a dataset with their predictions: which columns are kept, and how the rows are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_same_schema
from shoal.errors import DataError, InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.connector import DataConnector


def kept_columns(keep_cols: Sequence[str] | None, prediction_col: str, connector: DataConnector) -> tuple[str, ...]:
    """Return the columns of the dataset that are copied to the output: `keep_cols`, or all columns.

    Raises:
        DataError: The dataset does not have a column of `keep_cols`, or its files have different types for a column.
        InvalidArgumentError: The column of the predictions would have the name of one of these columns.
    """
    names = connector.schema().names
    if keep_cols is None:
        keep = tuple(names)
    elif missing := sorted(set(keep_cols) - set(names)):
        raise DataError(
            f"keep_cols names columns that the dataset does not have: {', '.join(missing)}. Correct or remove these "
            "names"
        )
    else:
        keep = tuple(keep_cols)
    if prediction_col in keep:
        raise InvalidArgumentError(
            f'the dataset has a column "{prediction_col}", and prediction_col has the same name: choose another '
            "prediction_col, or leave the column out of keep_cols"
        )
    check_same_schema(connector.source, keep_cols)
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


def write_tables(stream: Any, tables: Iterable[pa.Table]) -> None:
    """Write tables of the same schema to a stream as a Parquet file, each as one row group."""
    from pyarrow import parquet

    writer: parquet.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or parquet.ParquetWriter(stream, table.schema)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    finally:
        if writer is not None:
            writer.close()
