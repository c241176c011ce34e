"""Convert tables to pandas DataFrames, with the index and the types that pandas has stored in the files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.footers import stored_description
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
    """Return rows of a dataset with the text in their schema from which ``to_pandas`` restores pandas' types; see
    :func:`to_frame`."""
    import pyarrow as pa

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
        if pa.types.is_integer(field.type) and values.null_count and _would_be_rounded(values):
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
    description = stored_description(schema)
    if not description:
        return schema
    description["index_columns"] = [each for each in description["index_columns"] if isinstance(each, str)]
    return schema.with_metadata({**schema.metadata, b"pandas": json.dumps(description).encode()})


def to_exact_frame(table: pa.Table) -> pd.DataFrame:
    """Convert rows to a DataFrame, in which each integer column with nulls has a nullable type, such as ``Int64``.

    So the DataFrames of several parts of a dataset can be put together, although only some of them have nulls.
    """
    import pandas as pd
    import pyarrow as pa

    columns = {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(values.type) and values.null_count:
            nullable: Any = pd.api.types.pandas_dtype(str(values.type).replace("i", "I").replace("u", "U"))
            columns[name] = nullable.__from_arrow__(values)
    frame: pd.DataFrame = table.to_pandas()
    for name in columns.keys() & set(frame.columns):
        frame[name] = columns[name]
    return frame


def _would_be_rounded(values: pa.ChunkedArray) -> bool:
    """Return whether an integer column holds a value that float64 cannot represent exactly for certain."""
    import pyarrow.compute as pc

    ends = pc.min_max(values).as_py()
    return any(end is not None and abs(end) > EXACT_INTEGER for end in ends.values())
