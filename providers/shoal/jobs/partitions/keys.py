"""Keys of partitions: the values of a column, or of several columns, in the rows of a partition.

A key is a plain Python value of the column's type, such as an int, a text or a date, or a tuple of the values of
several columns. A null, and NaN in a column of floats, is the key None.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.checks import check_same_schema
from shoal.data.parquet.source import ParquetSource
from shoal.data.syntax import check_present
from shoal.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Key = Any
"""Type of a key."""


def key_type(source: ParquetSource, by: Sequence[str]) -> pa.DataType:
    """Check the columns of the keys, and return the type of the keys: that of the column, or a struct of several
    columns.

    Raises:
        DataError: A column does not exist, or its values cannot be keys.
    """
    import pyarrow as pa

    schema = source.schema()
    for name in by:
        check_present(source.reference().path, name, schema.names)
    check_same_schema(source, by)
    types = [_value_type(name, schema.field(name).type) for name in by]
    return types[0] if len(by) == 1 else pa.struct(list(zip(by, types, strict=True)))


def _value_type(name: str, found: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    kind = pa.types
    value = found.value_type if kind.is_dictionary(found) else found
    is_plain = any(
        check(value)
        for check in (
            kind.is_integer,
            kind.is_floating,
            kind.is_boolean,
            kind.is_string,
            kind.is_large_string,
            kind.is_date,
            kind.is_timestamp,
            kind.is_decimal,
        )
    )
    if not is_plain:
        raise DataError(
            f'column "{name}" is of type {found}, whose values cannot be keys of partitions: name a column of numbers, '
            "text, booleans, dates or timestamps"
        )
    return value


def encoded(table: pa.Table, by: Sequence[str]) -> tuple[np.ndarray, list[Key]]:
    """Return the keys of a table's rows: the index of each row's key, ``[rows]``, and the different keys."""
    import numpy as np

    codes, keys = _encoded_column(table.column(by[0]))
    if len(by) == 1:
        return codes, keys
    tuples: list[Key] = [(key,) for key in keys]
    for name in by[1:]:
        others, values = _encoded_column(table.column(name))
        # Only the combinations that occur are kept, so that the number of codes never exceeds the number of rows.
        found, codes = np.unique(codes * len(values) + others, return_inverse=True)
        tuples = [(*tuples[code // len(values)], values[code % len(values)]) for code in found.tolist()]
    return codes.astype(np.int64, copy=False), tuples


def _encoded_column(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Key]]:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not len(column):
        return np.zeros(0, np.int64), []
    values = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    codes = values.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    # NaN becomes null, and -0.0 is 0.0, so several codes may have the same key.
    places: dict[Key, int] = {}
    same = [places.setdefault(_normal(value), len(places)) for value in values.dictionary.to_pylist()]
    return np.array(same, np.int64)[codes], list(places)


def _normal(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def key_text(key: Key) -> str:
    """Return a text that identifies a key, with its type: ``int:7``, ``str:a``, ``null``, or ``[int:7|str:a]``."""
    if isinstance(key, tuple):
        return f"[{'|'.join(key_text(part).replace('|', '||') for part in key)}]"
    if key is None:
        return "null"
    if isinstance(key, datetime.datetime):  # also pandas' Timestamp
        return f"datetime:{key.isoformat()}"
    if isinstance(key, float):
        return f"float:{key + 0.0!r}"  # -0.0 becomes 0.0
    return f"{type(key).__name__}:{key}"


def shown_key(key: Key) -> str:
    """Return a key for messages, such as ``7`` or ``(7, 'a')``."""
    return repr(key) if isinstance(key, str | tuple) or key is None else str(key)


def bucket_of(text: str, buckets: int) -> int:
    """Return the number of the bucket that has the rows of a key, which is the same in every process."""
    return _digest(text) % buckets


def seed_of(seed: int, text: str) -> int:
    """Return the seed of a partition, from that of the run and the text of the key."""
    return _digest(f"{seed}/{text}") % 2**32


def _digest(text: str) -> int:
    content = text.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def key_column(keys: Iterable[Key], type_: pa.DataType) -> pa.Array:
    """Return keys as an Arrow array of their own type."""
    import pyarrow as pa

    if pa.types.is_struct(type_):
        names = [field.name for field in type_]
        return pa.array([dict(zip(names, key, strict=True)) for key in keys], type_)
    return pa.array(list(keys), type_)


def keys_in(column: pa.ChunkedArray) -> list[Key]:
    """Return the keys in a column that :func:`key_column` has made."""
    import pyarrow as pa

    found = column.to_pylist()
    return [tuple(key.values()) for key in found] if pa.types.is_struct(column.type) else found
