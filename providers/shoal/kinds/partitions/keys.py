"""Keys of partitions: the values of a column, or of several columns, in the rows of a partition.

A key is a plain Python value, such as an int, a text or a date, or a tuple of the values of several columns. Timestamps
are pandas' `Timestamp`, because two of Python's datetimes with one zone compare equal if their clocks show the same
time, also when this time exists twice. A null, and NaN in a column of floats, is the key None.

:func:`key_text` decides which keys are the same: numbers of any type by their value, timestamps with a zone by their
instant. Values of different kinds, such as a text and a number, are never the same key (:func:`check_same_kinds`).
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from shoal.data.checks import check_same_schema
from shoal.data.filters import check_present
from shoal.data.parquet.schema import EXACT_INTEGER, plain_type
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pc, pd

Key = Any
"""Type of a key."""

_SHOWN_KEYS = 5
"""Number of keys that a message names."""

_EXACT_FLOAT32 = 2**24
"""The float32 of this integer is also that of the next one."""


def key_type(source: ParquetSource, by: Sequence[str]) -> pa.DataType:
    """Check the columns of the keys, and return the type of the keys: that of the column, or a struct of several
    columns.

    Raises:
        DataError: A column does not exist, or its values cannot be keys.
    """
    schema = source.schema()
    for name in by:
        check_present(source.reference().path, name, schema.names)
    check_same_schema(source, by)
    return type_of_columns(schema, by)


def type_of_columns(schema: pa.Schema, by: Sequence[str]) -> pa.DataType:
    """Return the type of the keys in columns of a schema; see :func:`key_type`."""
    types = []
    for name in by:
        type_ = _plain_type(schema.field(name).type)
        if _kind(type_) is None:
            raise DataError(
                f'column "{name}" is of type {schema.field(name).type}, whose values cannot be keys of partitions: '
                "name a column of numbers, text, bytes, booleans, dates or timestamps"
            )
        types.append(type_)
    return types[0] if len(by) == 1 else pa.struct(list(zip(by, types, strict=True)))


def _plain_type(type_: pa.DataType) -> pa.DataType:
    """Return the type of a column's values, without the types that Arrow cannot encode as dictionaries, or encodes
    wrongly: it makes an empty text of a null in a ``string_view``."""
    plain = plain_type(type_)
    if pa.types.is_float16(plain):
        return pa.float32()
    if pa.types.is_decimal(plain) and plain.bit_width < 128:
        return pa.decimal128(plain.precision, plain.scale)
    return plain


def _kind(type_: pa.DataType) -> str | None:
    """Return the kind of the values of a plain type; None if they cannot be keys. Only values of one kind can be the
    same key, and ``null`` is a key of every kind."""
    kind = pa.types
    if kind.is_timestamp(type_):
        return "timestamp without a time zone" if type_.tz is None else "timestamp with a time zone"
    checks = {
        "null": (kind.is_null,),
        "boolean": (kind.is_boolean,),
        "number": (kind.is_integer, kind.is_floating, kind.is_decimal),
        "text": (kind.is_string, kind.is_large_string),
        "bytes": (kind.is_binary, kind.is_large_binary, kind.is_fixed_size_binary),
        "date": (kind.is_date,),
    }
    return next((name for name, those in checks.items() if any(check(type_) for check in those)), None)


def check_same_kinds(
    found: pa.DataType, wanted: pa.DataType, by: Sequence[str], keys: Iterable[Key] | None = None
) -> None:
    """Check that keys of two types can be the same, such as those of rows and of the models that predict them, and that
    no key of the rows is a rounded integer: beside a null, pandas makes floats of integers, and the float of one
    integer could be the key of another one's model.

    Args:
        found: Type of the keys of the rows.
        wanted: Type of the keys of the models.
        by: Columns of the keys of the rows.
        keys: Keys of the rows; None if only their type is known.

    Raises:
        DataError: The numbers or the order of the columns differ, or the kinds of their values; the message names both
            types. Or the models have integers as keys, and a float is so large that it may have been another integer.
    """
    mine, theirs = _columns(found), _columns(wanted)
    if len(mine) != len(theirs):
        raise DataError(
            f"the keys of the rows have {len(mine)} columns ({', '.join(by)}), but those of the models have "
            f"{len(theirs)}: name as many columns in by as in the training"
        )
    order = [name for name, _ in theirs]
    if any(name in order and name != other for name, other in zip(by, order, strict=True)):
        raise DataError(
            f"by names the columns {', '.join(by)}, but the keys of the models are {', '.join(order)}: name the "
            "columns in this order"
        )
    for column, (_, type_), (_, other) in zip(by, mine, theirs, strict=True):
        kinds = {_kind(type_), _kind(other)} - {"null"}
        if len(kinds) > 1:
            raise DataError(
                f'the keys in column "{column}" are of type {type_} ({_kind(type_)}), but those of the models are of '
                f"type {other} ({_kind(other)}), so no key could have a model: convert the column"
            )
    limits = [_first_rounded(type_, other) for (_, type_), (_, other) in zip(mine, theirs, strict=True)]
    for key in keys if keys and any(limits) else ():
        for value, limit, name in zip(key if isinstance(key, tuple) else (key,), limits, by, strict=True):
            if limit is not None and value is not None and limit <= abs(value) < math.inf:
                raise DataError(
                    f'the keys in column "{name}" are floats, and {value!r} may be a rounded integer, but the keys of '
                    "the models are integers: give the column an integer type, such as Int64 in pandas"
                )


def _first_rounded(found: pa.DataType, wanted: pa.DataType) -> int | None:
    """Return the smallest value of a type that may be another, rounded integer; None if integers are not rounded, or
    not wanted."""
    if not (pa.types.is_floating(found) and pa.types.is_integer(wanted)):
        return None
    return _EXACT_FLOAT32 if found == pa.float32() else EXACT_INTEGER


def _columns(type_: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """Return the name and the type of each column of keys; the name of the only column is not known."""
    if not pa.types.is_struct(type_):
        return [("", _plain_type(type_))]
    return [(field.name, _plain_type(field.type)) for field in type_]


def encoded(table: pa.Table, by: Sequence[str]) -> tuple[np.ndarray, list[Key]]:
    """Return the keys of a table's rows: the index of each row's key, ``[rows]``, and the different keys.

    Raises:
        DataError: A date or timestamp is out of the range of Python's.
    """
    codes, keys = _encoded_column(table.column(by[0]), by[0])
    if len(by) == 1:
        return codes, keys
    tuples: list[Key] = [(key,) for key in keys]
    for name in by[1:]:
        others, values = _encoded_column(table.column(name), name)
        # Only the combinations that occur are kept, so that the number of codes never exceeds the number of rows.
        found, codes = np.unique(codes * len(values) + others, return_inverse=True)
        tuples = [(*tuples[code // len(values)], values[code % len(values)]) for code in found.tolist()]
    return codes.astype(np.int64, copy=False), tuples


def _encoded_column(column: pa.ChunkedArray, name: str) -> tuple[np.ndarray, list[Key]]:
    if not len(column):
        return np.zeros(0, np.int64), []
    plain = column.cast(_plain_type(column.type)).combine_chunks()
    values = pc.dictionary_encode(plain, null_encoding="encode")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    codes = values.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    # NaN becomes null, and -0.0 is 0.0, so several codes may have the same key.
    places: dict[Key, int] = {}
    same = [places.setdefault(value, len(places)) for value in _python_values(values.dictionary, name)]
    return np.array(same, np.int64)[codes], list(places)


def _python_values(values: pa.Array, name: str) -> list[Key]:
    try:
        found = values.to_pylist()
    except (ValueError, OverflowError) as error:
        raise DataError(
            f'the keys in column "{name}" have a value of type {values.type} that Python cannot represent ({error}): '
            "correct the value"
        ) from error
    if pa.types.is_timestamp(values.type):
        found = list(values.to_pandas())
    return [None if _is_null(value) else value + 0.0 if isinstance(value, float) else value for value in found]


def _is_null(value: Any) -> bool:
    # pandas' NA is neither equal nor unequal to itself.
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def key_text(key: Key) -> str:
    """Return a text that identifies a key: ``int:7``, ``float:0.5``, ``str:a``, ``null``, or ``[int:7|str:a]``.

    Two keys have the same text if they are the same key: 7, 7.0, ``Decimal(7)`` and NumPy's 7, or the same instant in
    two time zones.

    Raises:
        InvalidArgumentError: The key is no value of a column.
    """
    if isinstance(key, tuple):
        return f"[{'|'.join(key_text(part).replace('|', '||') for part in key)}]"
    if isinstance(key, list | dict | set) or getattr(key, "shape", ()) != ():
        raise InvalidArgumentError(
            f"{key!r} is not a key of a partition: give a value of the column, or a tuple of values of several columns"
        )
    if hasattr(key, "dtype") and hasattr(key, "item"):
        key = _of_numpy(key)
    if _is_null(key):
        return "null"
    if isinstance(key, datetime.datetime):  # also pandas' Timestamp
        instant = key if key.tzinfo is None else key.astimezone(datetime.UTC)
        return f"datetime:{instant.isoformat()}"
    if isinstance(key, str):
        return f"str:{str.__str__(key)}"
    if isinstance(key, bytes):
        return f"bytes:{key.hex()}"
    if isinstance(key, int | float | Decimal) and not isinstance(key, bool):
        return _number_text(key)
    return f"{type(key).__name__}:{key}"


def _of_numpy(value: Any) -> Any:
    """Return a scalar of NumPy as a Python value, and a ``datetime64`` that is finer than a day as a `Timestamp`."""
    if value.dtype.kind != "M" or value.dtype == "datetime64[D]":
        return value.item() if value.dtype.char != "g" else float(value)
    return pd.Timestamp(value)


def _number_text(value: float | Decimal) -> str:
    if not math.isfinite(value):
        return f"float:{float(value)!r}"
    numerator, denominator = value.as_integer_ratio()
    if denominator == 1:
        return f"int:{numerator}"
    return f"float:{float(value)!r}" if float(value) == value else f"ratio:{numerator}/{denominator}"


def shown_key(key: Key) -> str:
    """Return a key for messages, such as ``7`` or ``(7, 'a')``."""
    if isinstance(key, tuple):
        return f"({', '.join(map(shown_key, key))})"
    return repr(key) if isinstance(key, str | bytes) or key is None else str(key)


def some_keys(rows_of: Mapping[str, int]) -> str:
    """Return the first keys with their numbers of rows for messages, such as ``7 (12 rows), 8 (1 row) and 3 more``.

    Args:
        rows_of: Number of rows of each key, as :func:`shown_key` shows it.
    """
    shown = [f"{key} ({rows:,} row{'' if rows == 1 else 's'})" for key, rows in [*rows_of.items()][:_SHOWN_KEYS]]
    more = len(rows_of) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


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
    if pa.types.is_struct(type_):
        names = [field.name for field in type_]
        return pa.array([dict(zip(names, key, strict=True)) for key in keys], type_)
    return pa.array(list(keys), type_)


def keys_in(column: pa.ChunkedArray) -> list[Key]:
    """Return the keys in a column that :func:`key_column` has made."""
    values = column.combine_chunks()
    if not pa.types.is_struct(column.type):
        return _python_values(values, "key")
    return list(zip(*(_python_values(values.field(field.name), field.name) for field in column.type), strict=True))
