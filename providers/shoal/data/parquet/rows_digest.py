"""Compute fingerprints of rows from their values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from decimal import Context
from typing import Any

from shoal.lazy_imports import np, pa, pc

STORED = b"shoal_rows_digest"
"""Key of the metadata of a Parquet file under which shoal stores the fingerprint of the rows that it has written."""

_EXACT = Context(prec=100)


class RowsDigest:
    """Fingerprint of rows, which are added table by table.

    The width of a type does not matter: equal values have the same fingerprint, for example as int32 and as int64. This
    holds for whole numbers, floats, decimals, texts, dates, timestamps, and lists and structs of them. The order of the
    rows changes the fingerprint, but the order of the columns does not.

    Args:
        schema: Columns that count. The tables may have more.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = {field.name: _Column(field.type) for field in schema}
        self._rows = 0

    def add(self, rows: pa.Table) -> None:
        """Add the values of further rows."""
        self._rows += rows.num_rows
        for name, column in self._columns.items():
            for chunk in rows.column(name).chunks:
                column.add(chunk)

    def hexdigest(self) -> str:
        """Return the fingerprint of all rows so far: 32 hex digits."""
        digest = hashlib.sha256(repr(self._rows).encode())
        for name in sorted(self._columns):
            column = self._columns[name]
            digest.update(repr((name, column.kind, column.hexdigest())).encode())
        return digest.hexdigest()[:32]


def rows_digest(tables: Iterable[pa.Table], schema: pa.Schema) -> str:
    """Compute the fingerprint of the rows of several tables; see :class:`RowsDigest`."""
    digest = RowsDigest(schema)
    for table in tables:
        digest.add(table)
    return digest.hexdigest()


def kind_of(type_: pa.DataType) -> str:
    """Return the kind of an Arrow type. Equal values have the same fingerprint in all types of one kind."""
    return _kind_and_converter(type_)[0]


class _Column:
    """Hashes of a column's values and of the positions of its nulls, computed chunk by chunk.

    The hashes do not depend on how the column is divided into chunks.
    """

    def __init__(self, type_: pa.DataType) -> None:
        self.kind, self._bytes_of = _kind_and_converter(type_)
        self._parts = [_Column(part) for part in _parts_of(type_)]
        self._valid = hashlib.sha256()
        self._streams = (hashlib.sha256(), hashlib.sha256())

    def add(self, values: pa.Array) -> None:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        self._valid.update(pc.is_valid(values).to_numpy(zero_copy_only=False).astype(np.uint8).tobytes())
        for stream, content in zip(self._streams, self._bytes_of(values), strict=False):
            stream.update(content)
        if self._parts:
            found = values.flatten()
            for part, content in zip(self._parts, found if isinstance(found, list) else [found], strict=True):
                part.add(content)

    def hexdigest(self) -> tuple[str, ...]:
        hashes = (self._valid, *self._streams)
        return (*(each.hexdigest() for each in hashes), *(text for part in self._parts for text in part.hexdigest()))


def _parts_of(type_: pa.DataType) -> Sequence[pa.DataType]:
    if pa.types.is_struct(type_):
        return [field.type for field in type_]
    return [type_.value_type] if is_list(type_) else []


def is_list(type_: pa.DataType) -> bool:
    """Return whether a type is one of Arrow's list types, but not a map."""
    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _kind_and_converter(type_: pa.DataType) -> tuple[str, Callable[[Any], tuple[bytes | memoryview, ...]]]:
    """Return the kind of an Arrow type, such as "int", and a function that converts an array to bytes for the hash."""
    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_boolean(type_):
        return "bool", lambda values: _fixed(values, pa.uint8())
    if types.is_integer(type_) and type_ != pa.uint64():
        return "int", lambda values: _fixed(values, pa.int64())
    if types.is_floating(type_):
        return "float", _floats
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "text", lambda values: _variable(values.cast(pa.large_string()), "")
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_):
        return "bytes", lambda values: _variable(values.cast(pa.large_binary()), b"")
    if types.is_date(type_):
        return "date", lambda values: _fixed(values.cast(pa.date32()), pa.int32())
    if types.is_timestamp(type_):
        unit = "ns" if type_.unit == "ns" else "us"
        zone = "UTC" if type_.tz else None
        kind = f"timestamp {unit} {zone}"
        return kind, lambda values: _fixed(values.cast(pa.timestamp(unit, zone), safe=False), pa.int64())
    if types.is_decimal(type_):
        return "decimal", _decimals
    if types.is_struct(type_):
        return f"struct<{', '.join(f'{field.name}: {kind_of(field.type)}' for field in type_)}>", lambda values: ()
    if is_list(type_):
        return f"list<{kind_of(type_.value_type)}>", lambda values: _fixed(pc.list_value_length(values), pa.int64())
    # Libraries give other names to the keys and values of maps.
    kind = f"map<{kind_of(type_.key_type)}, {kind_of(type_.item_type)}>" if types.is_map(type_) else str(type_)
    return kind, lambda values: _texts(values, repr)


def _fixed(values: pa.Array, type_: pa.DataType) -> tuple[bytes]:
    return (values.cast(type_).fill_null(0).to_numpy(zero_copy_only=False).tobytes(),)


def _floats(values: pa.Array) -> tuple[bytes]:
    found = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    # NaN has many bit patterns, which are replaced by one pattern, so that every NaN gives the same hash.
    return (np.where(np.isnan(found), np.nan, found).tobytes(),)


def _decimals(values: pa.Array) -> tuple[bytes | memoryview, ...]:
    # The text does not depend on the scale of the decimal: 1.5 and 1.50 both become "1.5".
    if not 0 < values.type.scale <= 6:  # Arrow writes smaller numbers with an exponent
        return _texts(values, lambda value: f"{value.normalize(_EXACT):f}")
    texts = values.drop_null().cast(pa.large_string())
    return _variable(pc.replace_substring_regex(texts, r"\.?0*$", "\0"), "")[1:]


def _variable(values: pa.Array, missing: str | bytes) -> tuple[bytes | memoryview, ...]:
    filled = values.fill_null(missing)
    _, offsets, content = filled.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(filled) + 1, offset=8 * filled.offset)
    used = memoryview(content)[ends[0] : ends[-1]] if content is not None else b""
    return np.diff(ends).tobytes(), used


def _texts(values: pa.Array, write: Callable[[Any], str]) -> tuple[bytes]:
    return ("".join(f"{write(value)}\0" for value in values.to_pylist() if value is not None).encode(),)
