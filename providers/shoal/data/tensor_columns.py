"""Convert columns of Arrow tables for torch datasets: numbers to NumPy arrays, text and bytes to Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.data.parquet.footers import kind_of
from shoal.data.planning import RowRange
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Column: TypeAlias = "np.ndarray | pa.Array"

OBJECTS = "object"
"""Name of the dtype of text and bytes columns. The values of these columns become Python objects and not tensors."""

# Unsigned Arrow type -> signed type to which its values are converted. torch has the dtypes uint16, uint32 and uint64,
# but few of torch's operations support these dtypes.
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def dtype_of(type_: pa.DataType) -> str | None:
    """Return the NumPy dtype to which a column of an Arrow type is converted.

    Returns:
        Name of the dtype; None if torch does not support the type. Signed integers, uint8 and floats keep their width.
        uint16 becomes int32, and uint32 and uint64 become int64. Decimals become float64, and text and bytes become
        :data:`OBJECTS`.
    """
    import pyarrow as pa

    types = pa.types
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
    import pyarrow as pa

    if isinstance(type_, pa.FixedShapeTensorType):
        permuted = list(type_.permutation or []) not in ([], list(range(len(type_.shape))))
        return None if permuted else (tuple(type_.shape), type_.value_type)
    shape: list[int] = []
    while pa.types.is_fixed_size_list(type_) or (not shape and _is_variable(type_)):
        shape.append(type_.list_size if pa.types.is_fixed_size_list(type_) else length)
        type_ = type_.value_type
    return (tuple(shape), type_) if shape else None


def _is_variable(type_: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _to_lists(column: pa.ChunkedArray, name: str, dtype: np.dtype, part: RowRange) -> np.ndarray:
    """Convert a column of lists to an array ``[rows, *shape]``, which uses the memory of Arrow's elements."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

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
            per_row *= dtype.shape[0]
        else:
            per_row *= type_.list_size
        column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], type_.value_type)
    values = to_column(column, name, dtype.base.name, part)
    assert isinstance(values, np.ndarray)
    return values.reshape(rows, *dtype.shape)


def to_column(column: pa.ChunkedArray, name: str, dtype: str, part: RowRange) -> Column:
    """Convert a column of an Arrow table to a NumPy array. A column of text or bytes is converted to an Arrow array.

    The values are not copied if they already have the right type.

    Returns:
        A NumPy array ``[rows]`` (lists: ``[rows, *shape]``) with nulls as NaN, or an
        Arrow array ``[rows]`` for text (large_string) and bytes
        (large_binary).
    """
    import numpy as np
    import pyarrow as pa

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
    import numpy as np
    import pyarrow as pa

    if isinstance(pieces[0], np.ndarray):
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole if order is None else whole.take(order, axis=0)
    joined = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    return joined if order is None else joined.take(pa.array(order))


def copied(column: Column, start: int, stop: int) -> np.ndarray | list[Any]:
    """Copy the rows ``start <= i < stop`` of a column, so that the whole column can be freed while the copy is in use.

    Returns:
        A NumPy array, or a list of str or bytes.
    """
    import numpy as np

    if isinstance(column, np.ndarray):
        return column[start:stop].copy()
    # `to_numpy().tolist()` is used, because Arrow's `to_pylist` creates a scalar object for every value and takes ten
    # times as long.
    values: list[Any] = column.slice(start, stop - start).to_numpy(zero_copy_only=False).tolist()
    return values
