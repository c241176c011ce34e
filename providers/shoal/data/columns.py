"""Arrow columns as what torch items are made of: NumPy arrays, or Arrow's own where the values are text or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from shoal.data.planning.row_groups import RowRange
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Column: TypeAlias = "np.ndarray | pa.Array"

OBJECTS = "object"
"""The dtype of columns of text and bytes, whose items are Python objects."""

# torch has these three, but hardly anything that computes with them.
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def dtype_of(type_: pa.DataType) -> str | None:
    """The NumPy dtype that a column is handed out in.

    Args:
        type_: Type of the column; of a dictionary, its values' type counts.

    Returns:
        Integers and floats keep their width (unsigned ones take the next wider signed type, uint64 takes int64),
        decimals are float64, text and bytes :data:`OBJECTS`; None where torch has nothing for it.
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
    return OBJECTS if _is_text(type_) or _is_bytes(type_) else None


def to_column(column: pa.ChunkedArray, name: str, dtype: str, part: RowRange) -> Column:
    """Converts a column of one row range; without a copy where it is stored as it is handed out.

    Args:
        column: Its values.
        name: Its name.
        dtype: What :func:`dtype_of` says of its type.
        part: Where the rows come from.

    Returns:
        An array ``[rows]``: of NumPy, nulls as NaN, or of Arrow for text (large_string) and bytes (large_binary).

    Raises:
        DataError: Naming file, row group and column, if there is a null that cannot be NaN, or an integer above the
            largest int64.
    """
    import numpy as np
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    type_ = column.type
    where = f'{part.path}, row group {part.row_group}: column "{name}" of type {type_}'
    if column.null_count and not (pa.types.is_floating(type_) or pa.types.is_decimal(type_)):
        raise DataError(
            f"{where} is null in {column.null_count} of {len(column)} rows, and only floats have NaN for that: "
            "fill them in, leave these rows out, or write the column as floats"
        )
    if dtype == OBJECTS:
        # With 64-bit offsets, any number of row groups can be joined.
        column = column.cast(pa.large_string() if _is_text(type_) else pa.large_binary())
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_decimal(type_):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(type_):
        # Arrow keeps booleans as bits, which NumPy cannot view.
        column = column.cast(pa.uint8())
    pieces = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
    values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(
            f"{where} holds {values.max()}, above the largest int64, which is what torch computes with: "
            "write it as text, or divide it into two columns"
        )
    return values.astype(dtype, copy=False)


def rearranged(pieces: Sequence[Column], order: np.ndarray | None) -> Column:
    """Joins the pieces of a column and puts its rows in another order.

    Args:
        pieces: The column of each row range.
        order: Positions ``[rows]`` in what is joined; None leaves the order.

    Returns:
        An array ``[rows]``; the only piece itself where nothing is to do.
    """
    import numpy as np
    import pyarrow as pa

    if isinstance(pieces[0], np.ndarray):
        whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return whole if order is None else whole.take(order)
    joined = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
    return joined if order is None else joined.take(pa.array(order))


def copied(column: Column, start: int, stop: int) -> np.ndarray | list[Any]:
    """Copies the rows ``start <= i < stop``, so that whoever keeps them keeps no more than them.

    Returns:
        An array, or a list of str or bytes.
    """
    import numpy as np

    if isinstance(column, np.ndarray):
        return column[start:stop].copy()
    # By way of NumPy: Arrow's own `to_pylist` makes a scalar of its own for every value, and takes ten times as long.
    values: list[Any] = column.slice(start, stop - start).to_numpy(zero_copy_only=False).tolist()
    return values


def _is_text(type_: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_))


def _is_bytes(type_: pa.DataType) -> bool:
    import pyarrow as pa

    types = pa.types
    views = getattr(types, "is_binary_view", lambda _: False)
    return bool(
        types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_) or views(type_)
    )
