"""Tables of rows as users get them: with predictions, as Parquet files, and as DataFrames with pandas' own types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.data.checks import check_same_schema
from shoal.data.parquet.footers import stored_description
from shoal.data.parquet.schema import EXACT_INTEGER
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pc, pd, pq


def kept_columns(keep_cols: Sequence[str] | None, prediction_col: str, source: ParquetSource) -> tuple[str, ...]:
    """Return the columns of the dataset that are copied to the output: `keep_cols`, or all columns."""
    names = source.schema().names
    keep = tuple(names if keep_cols is None else keep_cols)
    if missing := sorted(set(keep) - set(names)):
        raise DataError(
            f"keep_cols names columns that the dataset does not have: {', '.join(missing)}. Correct or remove these "
            "names"
        )
    if prediction_col in keep:
        raise InvalidArgumentError(
            f'the dataset has a column "{prediction_col}", and prediction_col has the same name: choose another '
            "prediction_col, or leave the column out of keep_cols"
        )
    check_same_schema(source, keep_cols)
    return keep


def with_predictions(table: pa.Table, predicted: np.ndarray, column: str) -> pa.Table:
    """Append predictions to a table, as one column, or several if the model returns several values per row."""
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
    writer: pq.ParquetWriter | None = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(stream, table.schema)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    finally:
        if writer is not None:
            writer.close()


def to_frame(table: pa.Table, source: ParquetSource) -> pd.DataFrame:
    """Convert rows of a dataset to a DataFrame, like ``pandas.read_parquet``.

    The index and nullable types such as ``Int64`` are restored from the text that pandas has written into the first
    file. In addition, an integer column with nulls becomes ``Int64`` or ``UInt64`` if float64 would round its values.
    """
    frame: pd.DataFrame = described(table, source).to_pandas()
    return frame


def described(table: pa.Table, source: ParquetSource) -> pa.Table:
    """Return rows of a dataset with the text in their schema from which ``to_pandas`` restores pandas' types; see
    :func:`to_frame`."""
    reference = source.reference()
    footer = source.metadata(reference.path)
    description = stored_description(footer)
    known = {column.get("field_name", column["name"]): column for column in description.get("columns", [])}
    in_file = {field.name: field.type for field in reference.schema} if known else {}
    changed = {}
    for field, values in zip(table.schema, table.columns, strict=True):
        name = field.name
        if name in known and field.type != in_file.get(name):
            # Another file has a wider type, or the column is a partition directory: pandas' type does not apply.
            changed[name] = {**known[name], "numpy_type": "object", "metadata": None}
        ends = pc.min_max(values).as_py() if pa.types.is_integer(field.type) and values.null_count else {}
        if any(end is not None and abs(end) > EXACT_INTEGER for end in ends.values()):
            # float64 would perhaps round such an integer.
            nullable = "Int64" if pa.types.is_signed_integer(field.type) else "UInt64"
            plain = {"name": name, "field_name": name, "pandas_type": str(field.type), "metadata": None}
            changed[name] = {**known.get(name, plain), "numpy_type": nullable}
    text = (footer.metadata or {}).get(b"pandas")
    if changed:
        columns = list((known | changed).values())
        text = json.dumps({"index_columns": [], "column_indexes": [], **description, "columns": columns}).encode()
    return table.replace_schema_metadata({b"pandas": text} if text else None)


def without_row_numbers(schema: pa.Schema) -> pa.Schema:
    """Remove an index that only counts the rows from pandas' text in a schema, because the rows are in another order
    now."""
    if not (description := stored_description(schema)):
        return schema
    description["index_columns"] = [each for each in description["index_columns"] if isinstance(each, str)]
    return schema.with_metadata({**schema.metadata, b"pandas": json.dumps(description).encode()})


def to_exact_frame(table: pa.Table) -> pd.DataFrame:
    """Convert rows to a DataFrame, in which each integer column with nulls has a nullable type, such as ``Int64``.

    So the DataFrames of several parts of a dataset can be put together, although only some of them have nulls.
    """
    columns = {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(values.type) and values.null_count:
            nullable: Any = pd.api.types.pandas_dtype(str(values.type).replace("i", "I").replace("u", "U"))
            columns[name] = nullable.__from_arrow__(values)
    frame: pd.DataFrame = table.to_pandas()
    for name in columns.keys() & set(frame.columns):
        frame[name] = columns[name]
    return frame
