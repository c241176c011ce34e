"""Convert columns of Arrow tables to NumPy: dense float arrays and codes of categories for the boosting libraries, and
the arrays of torch datasets.

A category has the same code in every worker, in every eval set and at prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.data.parquet.files import WHOLE_NUMBER
from shoal.data.parquet.rows_digest import kind_of
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowRange
from shoal.errors import DataError
from shoal.lazy_imports import np, pa, pc

# Number of rows that are copied together, column by column. The matrix is row-major, so copying a whole column touches
# one cache line per value. For 1M x 50 values this took 0.34 s, but only 0.08 s in blocks that fit in the cache. A
# block of 4096 x 50 float32 values has 800 KB.
_BLOCK_ROWS = 4_096


def to_matrix(table: pa.Table, columns: Sequence[str], dtype: Any = "float32") -> np.ndarray:
    """Copy columns into a dense matrix. Each value is copied only once."""
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
    return to_matrix(table, [column], dtype).ravel()


def _reader(column: pa.Array) -> Callable[[int, int], Any]:
    """Return a function ``read(start, stop)`` that returns the column's rows ``start <= i < stop`` as a NumPy array.

    If the column has no nulls, the array is a view of the column and no values are copied. Arrow's `to_numpy` is not
    used, because `to_numpy` imports pandas, for which a worker would need 0.5 s and 40 MiB.
    """
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
    if kind_of(type_) == "text":
        return pa.large_string()
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_integer(type_):
        return pa.int64()
    return pa.bool_() if pa.types.is_boolean(type_) else None


def find_categories(source: ParquetSource, columns: Sequence[str]) -> dict[str, pa.Array]:
    """Read columns, one row group at a time, and collect the distinct values (categories) of each column."""
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
    for name, values in categories.items():
        codes = pc.index_in(_comparable(table, name, values.type), value_set=values)
        table = table.set_column(table.column_names.index(name), name, codes)
    return table


def to_lists(categories: Categories) -> dict[str, list[Any]]:
    """Convert the categories of each column to a list of str, int or bool, which can be stored as JSON."""
    return {name: values.to_pylist() for name, values in categories.items()}


def from_lists(lists: Mapping[str, Sequence[Any]]) -> dict[str, pa.Array]:
    """Convert the lists from `to_lists` back to Arrow arrays of categories."""
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
    if pa.types.is_integer(type_) and category_type(values.type) == pa.large_string():
        values = values.cast(pa.large_string())
        is_number = pc.match_substring_regex(values, f"^{WHOLE_NUMBER.pattern}$")
        values = pc.if_else(is_number, values, pa.scalar(None, values.type))
    return values.cast(type_)


def _comparable(table: pa.Table, name: str, type_: pa.DataType) -> pa.ChunkedArray:
    try:
        return as_categories(table.column(name), type_)
    except pa.ArrowInvalid as exc:
        raise DataError(f'the categories of column "{name}" cannot be sorted ({exc}): write them as text') from exc


Column: TypeAlias = "np.ndarray | pa.Array"

OBJECTS = "object"
"""Name of the dtype of the columns whose values become Python objects and not tensors: text, bytes, structs, and lists
of these."""

# Unsigned Arrow type -> signed type to which its values are converted. torch has the dtypes uint16, uint32 and uint64,
# but few of torch's operations support these dtypes.
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def dtype_of(type_: pa.DataType) -> str | None:
    """Return the NumPy dtype to which a column of an Arrow type is converted.

    Returns:
        Name of the dtype; None if torch does not support the type. Signed integers, uint8 and floats keep their width.
        uint16 becomes int32, and uint32 and uint64 become int64. Decimals become float64. Text, bytes, structs and
        lists of these become :data:`OBJECTS`.
    """
    types = pa.types
    if types.is_struct(type_):
        return OBJECTS
    if _is_variable(type_) or types.is_fixed_size_list(type_):
        return OBJECTS if dtype_of(type_.value_type) == OBJECTS else None
    if types.is_dictionary(type_):
        return dtype_of(type_.value_type)
    if types.is_integer(type_):
        return _WIDER.get(str(type_), str(type_))
    if types.is_floating(type_):
        return _FLOATS[str(type_)]
    if types.is_boolean(type_):
        return "bool"
    if types.is_decimal(type_):
        return "float64"
    return OBJECTS if kind_of(type_) in ("text", "bytes") or types.is_fixed_size_binary(type_) else None


def list_shape(type_: pa.DataType, length: int) -> tuple[tuple[int, ...], pa.DataType] | None:
    """Return the shape of the lists of a column, and the type of their elements.

    Returns:
        Shape of one row, and type of the elements; None if the column is not one of lists, or if lists of several
        lengths are inside other lists.
    """
    if isinstance(type_, pa.FixedShapeTensorType):
        permuted = list(type_.permutation or []) not in ([], list(range(len(type_.shape))))
        return None if permuted else (tuple(type_.shape), type_.value_type)
    shape: list[int] = []
    while pa.types.is_fixed_size_list(type_) or (not shape and _is_variable(type_)):
        shape.append(type_.list_size if pa.types.is_fixed_size_list(type_) else length)
        type_ = type_.value_type
    return (tuple(shape), type_) if shape else None


def _is_variable(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _to_lists(column: pa.ChunkedArray, name: str, dtype: np.dtype, part: RowRange) -> np.ndarray:
    """Convert a column of lists to an array ``[rows, *shape]``, which uses the memory of Arrow's elements."""
    place = f'{part.path}, row group {part.row_group}: column "{name}" of type {column.type}'
    rows = len(column)
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    per_row = 1
    while True:
        type_ = column.type
        floats = pa.types.is_floating(type_) or pa.types.is_decimal(type_)
        if column.null_count and not floats:
            row = part.row_number(int(np.argmax(column.is_null().to_numpy())) // per_row)
            raise DataError(
                f"{place} has a null list or element at row {row}, but only elements that are floats can be null "
                "(as NaN): fill in these values, or leave these rows out"
            )
        if not (pa.types.is_fixed_size_list(type_) or _is_variable(type_)):
            break
        if _is_variable(type_):
            lengths = pc.list_value_length(column).to_numpy()
            bad = np.flatnonzero(lengths != dtype.shape[0])
            if len(bad):
                raise DataError(
                    f"{place} has a list of {lengths[bad[0]]} elements at row {part.row_number(int(bad[0]))}, but "
                    f"lists of {dtype.shape[0]} in other rows: a tensor needs lists of one length, so pad or cut them"
                )
        per_row *= dtype.shape[0] if _is_variable(type_) else type_.list_size
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type_.value_type)
    values = to_column(column, name, dtype.base.name, part)
    assert isinstance(values, np.ndarray)
    return values.reshape(rows, *dtype.shape)


def to_column(column: pa.ChunkedArray, name: str, dtype: str, part: RowRange) -> Column:
    """Convert a column of an Arrow table to a NumPy array. A column of text or bytes is converted to an Arrow array.

    The values are not copied if they already have the right type.

    Returns:
        A NumPy array ``[rows]`` (lists: ``[rows, *shape]``) with nulls as NaN, or an Arrow array ``[rows]`` for text
        (large_string), bytes (large_binary), structs and lists of these.
    """
    if dtype.startswith("("):
        return _to_lists(column, name, np.dtype(dtype), part)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    type_ = column.type
    place = f'{part.path}, row group {part.row_group}: column "{name}" of type {type_}'
    if column.null_count and not (pa.types.is_floating(type_) or pa.types.is_decimal(type_)):
        raise DataError(
            f"{place} is null in {column.null_count} of {len(column)} rows, but only float columns can hold nulls (as "
            "NaN): fill in these values, leave these rows out, or write the column as floats"
        )
    if dtype == OBJECTS:
        # The values are cast to Arrow's "large" types, which have 64-bit offsets. With 32-bit offsets, the
        # array of several concatenated row groups could not exceed 2 GiB.
        if not pa.types.is_nested(type_):
            column = column.cast(pa.large_string() if kind_of(type_) == "text" else pa.large_binary())
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_decimal(type_):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(type_):
        # Arrow stores booleans as bits, which NumPy cannot read, so the booleans are first converted to bytes.
        column = column.cast(pa.uint8())
    pieces = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"{place} holds {values.max()}, which is above the largest int64 ({np.iinfo(np.int64).max}), the widest "
            "integer that torch computes with: write the column as text, or split it into two columns"
        )
    return values.astype(dtype, copy=False)


def rearranged(pieces: Sequence[Column], order: np.ndarray | None) -> Column:
    """Concatenate several arrays that contain values of the same column, and reorder the values."""
    if isinstance(pieces[0], np.ndarray):
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole if order is None else whole.take(order, axis=0)
    joined = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    return joined if order is None else joined.take(pa.array(order))


def copied(column: Column, start: int, stop: int) -> np.ndarray | list[Any]:
    """Copy the rows ``start <= i < stop`` of a column, so that the whole column can be freed while the copy is in use.

    Returns:
        A NumPy array, or a list of str, bytes, dict or list.
    """
    if isinstance(column, np.ndarray):
        return column[start:stop].copy()
    rows = column.slice(start, stop - start)
    # Arrow's `to_pylist` creates a scalar object for every value and takes ten times as long as `to_numpy().tolist()`,
    # which returns lists inside other values as arrays, however.
    values: list[Any] = (
        rows.to_pylist() if pa.types.is_nested(rows.type) else rows.to_numpy(zero_copy_only=False).tolist()
    )
    return values
