"""Convert tables to pandas DataFrames, with the index and the types that pandas has stored in the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.schema import EXACT_INTEGER

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


def to_frame(table: pa.Table, source: ParquetSource) -> pd.DataFrame:
    """Convert rows of a dataset to a DataFrame, like ``pandas.read_parquet``.

    The index and nullable types such as ``Int64`` are restored from the text that pandas has written into the first
    file. In addition, an integer column with nulls becomes ``Int64`` or ``UInt64`` if float64 would round its values.
    """
    frame: pd.DataFrame = described(table, source).to_pandas()
    return frame


def described(table: pa.Table, source: ParquetSource) -> pa.Table:
    """Return rows of a dataset with the description of their columns by which ``to_pandas`` restores pandas' types; see
    :func:`to_frame`."""

    reference = source.reference()
    stored = (source.metadata(reference.path).metadata or {}).get(b"pandas")
    columns = {
        # Another file has a wider type, to which pandas' type of this file does not apply.
        field.name: {"numpy_type": "object", "metadata": None}
        for field in table.schema
        if field.name in reference.schema.names and field.type != reference.schema.field(field.name).type
    }
    table = table.replace_schema_metadata({b"pandas": stored} if stored else None)
    return with_nullable_integers(_with_types(table, columns, only_known=True), always=False)


def without_row_numbers(schema: pa.Schema) -> pa.Schema:
    """Remove the description of an index that only counts the rows from a schema, because the rows are in another order
    now."""
    metadata = schema.metadata or {}
    if b"pandas" not in metadata:
        return schema
    found: dict[str, Any] = json.loads(metadata[b"pandas"])
    found["index_columns"] = [each for each in found["index_columns"] if isinstance(each, str)]
    return schema.with_metadata({**metadata, b"pandas": json.dumps(found).encode()})


def with_nullable_integers(table: pa.Table, *, always: bool) -> pa.Table:
    """Describe integer columns with nulls as ``Int64`` or ``UInt64``: all of them (`always`), or those that have values
    that float64 would round."""
    import pyarrow as pa

    columns = {
        field.name: {"numpy_type": "Int64" if pa.types.is_signed_integer(field.type) else "UInt64"}
        for field, values in zip(table.schema, table.columns, strict=True)
        if pa.types.is_integer(field.type) and values.null_count and (always or _would_be_rounded(values))
    }
    return _with_types(table, columns)


def _with_types(table: pa.Table, types: Mapping[str, Mapping[str, Any]], *, only_known: bool = False) -> pa.Table:
    """Change the description of columns, by their names, or only of those that pandas has described before."""
    stored = (table.schema.metadata or {}).get(b"pandas")
    if not types or (only_known and not stored):
        return table
    found: dict[str, Any] = json.loads(stored) if stored else {"index_columns": [], "column_indexes": []}
    columns = {column.get("field_name", column["name"]): column for column in found.get("columns", [])}
    for name, changed in types.items():
        plain = {"name": name, "field_name": name, "pandas_type": str(table.schema.field(name).type), "metadata": None}
        if name in columns or not only_known:
            columns[name] = {**columns.get(name, plain), **changed}
    found["columns"] = list(columns.values())
    return table.replace_schema_metadata({**(table.schema.metadata or {}), b"pandas": json.dumps(found).encode()})


def _would_be_rounded(values: pa.ChunkedArray) -> bool:
    """Return whether an integer column holds a value that float64 cannot represent exactly for certain."""
    import pyarrow.compute as pc

    ends = pc.min_max(values).as_py()
    return any(end is not None and abs(end) > EXACT_INTEGER for end in ends.values())
