"""Convert Arrow tables to the dense float arrays of the boosting libraries, and categorical columns to integer codes.

A value has the same code in every worker, in every eval set and at prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.files import WHOLE_NUMBER
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource


# Number of rows that are copied together, column by column. The matrix is row-major, so copying a whole column touches
# one cache line per value. For 1M x 50 values this took 0.34 s, but only 0.08 s in blocks that fit in the cache. A
# block of 4096 x 50 float32 values has 800 KB.
_BLOCK_ROWS = 4_096


def to_matrix(table: pa.Table, columns: Sequence[str], dtype: Any = "float32") -> np.ndarray:
    """Copy columns into a dense matrix. Each value is copied only once."""
    import numpy as np

    matrix = np.empty((table.num_rows, len(columns)), dtype=dtype)
    at = 0
    for batch in table.select(list(columns)).to_batches():
        reads = [_reader(column) for column in batch.columns]
        for start in range(0, batch.num_rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, batch.num_rows)
            with np.errstate(over="ignore"):
                for j, read in enumerate(reads):
                    matrix[at + start : at + stop, j] = read(start, stop)
        at += batch.num_rows
    return matrix


def to_vector(table: pa.Table, column: str, dtype: Any = "float64") -> np.ndarray:
    """Copy one column of a table into a NumPy vector."""
    import numpy as np

    vector = np.empty(table.num_rows, dtype=dtype)
    at = 0
    for chunk in table.column(column).chunks:
        with np.errstate(over="ignore"):
            vector[at : at + len(chunk)] = _reader(chunk)(0, len(chunk))
        at += len(chunk)
    return vector


def _reader(column: pa.Array) -> Callable[[int, int], Any]:
    """Return a function ``read(start, stop)`` that returns the column's rows ``start <= i < stop`` as a NumPy array.

    If the column has no nulls, the array is a view of the column and no values are copied. Arrow's `to_numpy` is not
    used, because `to_numpy` imports pandas, for which a worker would need 0.5 s and 40 MiB.
    """
    import numpy as np
    import pyarrow as pa

    if pa.types.is_null(column.type):
        return lambda start, stop: np.nan
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if pa.types.is_boolean(column.type):
        # Booleans are converted to bytes first, because Arrow stores booleans as bits, which NumPy cannot view.
        column = column.cast(pa.uint8())
    if column.null_count == 0:
        whole = np.from_dlpack(column)
        return lambda start, stop: whole[start:stop]
    # The NaN is taken from an array. The shorter `pa.scalar(nan)` would import pandas, which is slow.
    nan = pa.Array.from_buffers(pa.float64(), 1, [None, pa.py_buffer(np.array([np.nan]))])[0]
    return lambda start, stop: np.from_dlpack(
        column.slice(start, stop - start).cast(pa.float64(), safe=False).fill_null(nan)
    )


Categories = Mapping[str, "pa.Array"]
"""Categories of each categorical column, as a dict: column -> Arrow array of the column's distinct values in ascending
order. `category_type` returns the type of the array. The code of a category is its index in the array, from 0."""

MOST_CATEGORIES = 100_000
"""Maximum number of categories in a column. Every worker and every model contains all categories, which at this limit
are about 2 MB of text. In a column with more categories, such as customer ids, too few rows have the same category for
a model to learn from."""


def category_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type to which the values of a categorical column are converted.

    Columns of the same kind (text, integers or booleans) get the same type, even if the files store their values with
    different widths.

    Returns:
        large_string, int64 or bool; None if the column cannot be categorical.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return pa.large_string()
    if types.is_integer(type_):
        return pa.int64()
    return pa.bool_() if types.is_boolean(type_) else None


def find_categories(source: ParquetSource, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Read columns, one row group at a time, and collect the distinct values (categories) of each column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not columns:
        return {}
    schema = source.schema()
    found = {name: pa.array([], category_type(schema.field(name).type)) for name in columns}
    ranges = source.ranges()
    for rows, table in zip(ranges, source.read(ranges, columns), strict=True):
        for name, known in found.items():
            new = pc.unique(_comparable(table, name, known.type)).drop_null()
            found[name] = pc.unique(pa.chunked_array([known, new]))
            if len(found[name]) > MOST_CATEGORIES:
                raise DataError(
                    f'column "{name}" has more than {MOST_CATEGORIES:,} categories (the limit was exceeded in '
                    f"{rows.path}, row group {rows.row_group}): merge the rare categories into one, or leave the "
                    "column out"
                )
    for name, values in found.items():
        if not len(values):
            raise DataError(
                f'column "{name}" is null in every row: leave the column out, or fix the program that writes the '
                "dataset"
            )
    return {name: values.take(pc.sort_indices(values)) for name, values in found.items()}


def encoded(table: pa.Table, categories: Categories) -> pa.Table:
    """Replace the values of a table's categorical columns by integer codes, and return the new table."""
    import pyarrow.compute as pc

    for name, values in categories.items():
        codes = pc.index_in(_comparable(table, name, values.type), value_set=values)
        table = table.set_column(table.column_names.index(name), name, codes)
    return table


def to_lists(categories: Categories) -> dict[str, list[Any]]:
    """Convert the categories of each column to a list of str, int or bool, which can be stored as JSON."""
    return {name: values.to_pylist() for name, values in categories.items()}


def from_lists(lists: Mapping[str, Sequence[Any]]) -> dict[str, pa.Array]:
    """Convert the lists from `to_lists` back to Arrow arrays of categories."""
    import pyarrow as pa

    categories = {}
    for name, values in lists.items():
        try:
            array = pa.array(values)
        except pa.ArrowException as error:
            raise DataError(
                f'the model\'s categories of column "{name}" are not of one type ({error}), which shoal does not '
                "support: train the model on categories of one type"
            ) from error
        type_ = pa.float64() if pa.types.is_floating(array.type) else category_type(array.type)
        if type_ is None:
            raise DataError(
                f'the model\'s categories of column "{name}" are of type {array.type}, which shoal does not support: '
                "they must be text, numbers or booleans"
            )
        categories[name] = array.cast(type_)
    return categories


def as_categories(values: pa.Array | pa.ChunkedArray, type_: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Convert values to the type of a column's categories. A text that is not a whole number equals no integer, and
    becomes null.

    :func:`shoal.data.checks.check_categories` allows text and integers in one column only for partition columns.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(type_) and category_type(values.type) == pa.large_string():
        values = values.cast(pa.large_string())
        is_number = pc.match_substring_regex(values, f"^{WHOLE_NUMBER.pattern}$")
        values = pc.if_else(is_number, values, pa.scalar(None, values.type))
    return values.cast(type_)


def _comparable(table: pa.Table, name: str, type_: pa.DataType) -> pa.ChunkedArray:
    import pyarrow as pa

    try:
        return as_categories(table.column(name), type_)
    except pa.ArrowInvalid as exc:
        raise DataError(f'the categories of column "{name}" cannot be sorted ({exc}): write them as text') from exc
