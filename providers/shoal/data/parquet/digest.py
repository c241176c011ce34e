"""Compute fingerprints of Parquet datasets, from the footers of the files or from the values of the rows.

A fingerprint that is computed from the values does not change if the same rows are stored in other files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from decimal import Context
from typing import TYPE_CHECKING, Any

from shoal.data.parquet.footers import Footer

if TYPE_CHECKING:
    import pyarrow as pa

_EXACT = Context(prec=100)


def rows_digest(tables: Iterable[pa.Table], schema: pa.Schema) -> str:
    """Compute a fingerprint of rows from their values.

    The width of a type does not matter: equal values have the same fingerprint, for example as int32 and as int64. This
    holds for whole numbers, floats, decimals, texts, dates, and timestamps up to microseconds. The order of the rows
    changes the fingerprint, but the order of the columns does not.
    """
    columns = {field.name: _Column(field.type) for field in schema}
    rows = 0
    for table in tables:
        rows += table.num_rows
        for name, column in columns.items():
            for chunk in table.column(name).chunks:
                column.add(chunk)
    digest = hashlib.sha256(repr(rows).encode())
    for name in sorted(columns):
        digest.update(repr((name, columns[name].kind, columns[name].hexdigest())).encode())
    return digest.hexdigest()[:32]


def kind_of(type_: pa.DataType) -> str:
    """Return the kind of an Arrow type. Equal values have the same fingerprint in all types of one kind."""
    return _kind_and_converter(type_)[0]


def footer_texts(footer: Footer, metadata: Any) -> Iterator[str]:
    """Yield the texts from a file's footer that determine the file's fingerprint: sizes, schema, partition values,
    statistics.
    """
    yield repr((footer.size, footer.groups, footer.partitions, str(footer.schema)))
    for row_group in range(metadata.num_row_groups):
        group = metadata.row_group(row_group)
        for chunk in map(group.column, range(group.num_columns)):
            text = f"{chunk.path_in_schema}:{chunk.total_compressed_size}:{chunk.total_uncompressed_size}"
            stats = chunk.statistics if chunk.is_stats_set else None
            if stats is not None and stats.has_min_max:
                text += f":{stats.null_count}:{stats.min_raw!r}:{stats.max_raw!r}"
            yield text


def texts_digest(texts: Iterable[str]) -> str:
    """Compute a fingerprint of 32 hex digits from texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()[:32]


class _Column:
    """Hashes of a column's values and of the positions of its nulls, computed chunk by chunk.

    The hashes do not depend on how the column is divided into chunks.
    """

    def __init__(self, type_: pa.DataType) -> None:
        self.kind, self._bytes_of = _kind_and_converter(type_)
        self._valid = hashlib.sha256()
        self._streams = (hashlib.sha256(), hashlib.sha256())

    def add(self, values: pa.Array) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        self._valid.update(pc.is_valid(values).to_numpy(zero_copy_only=False).astype(np.uint8).tobytes())
        for stream, content in zip(self._streams, self._bytes_of(values), strict=False):
            stream.update(content)

    def hexdigest(self) -> tuple[str, ...]:
        return tuple(stream.hexdigest() for stream in (self._valid, *self._streams))


def _kind_and_converter(type_: pa.DataType) -> tuple[str, Callable[[Any], tuple[bytes | memoryview, ...]]]:
    """Return the kind of an Arrow type, such as "int", and a function that converts an array to bytes for the hash."""
    import pyarrow as pa

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
        # The text does not depend on the scale of the decimal: 1.5 and 1.50 both become "1.5".
        return "decimal", lambda values: _texts(values, lambda value: f"{value.normalize(_EXACT):f}")
    return str(type_), lambda values: _texts(values, repr)


def _fixed(values: pa.Array, type_: pa.DataType) -> tuple[bytes]:
    return (values.cast(type_).fill_null(0).to_numpy(zero_copy_only=False).tobytes(),)


def _floats(values: pa.Array) -> tuple[bytes]:
    import numpy as np
    import pyarrow as pa

    found = values.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    # NaN has many bit patterns, which are replaced by one pattern, so that every NaN gives the same hash.
    return (np.where(np.isnan(found), np.nan, found).tobytes(),)


def _variable(values: pa.Array, missing: str | bytes) -> tuple[bytes | memoryview, ...]:
    import numpy as np

    filled = values.fill_null(missing)
    _, offsets, content = filled.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(filled) + 1, offset=8 * filled.offset)
    used = memoryview(content)[ends[0] : ends[-1]] if content is not None else b""
    return np.diff(ends).tobytes(), used


def _texts(values: pa.Array, write: Callable[[Any], str]) -> tuple[bytes]:
    return ("".join(f"{write(value)}\0" for value in values.to_pylist() if value is not None).encode(),)
