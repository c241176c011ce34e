"""Types of columns that are written as text, as in CSV files: find them from the values of all rows, and convert the
values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from shoal.lazy_imports import pa, pc

ColumnType = Literal[
    "bool", "int32", "int64", "float32", "float64", "string", "date32", "timestamp[us]", "timestamp[us, UTC]"
]
"""Types that the option `columns` accepts: Arrow's names."""

NULL_WORDS = ("", "NA", "N/A", "n/a", "NULL", "Null", "null", "None")
"""Texts that are null in columns of all types but text, where only an empty field without quotes is null. NaN is no
null, but a number."""

# Texts that Arrow would convert to numbers, but that are keys (leading zeros, more digits than an int64 has),
# telephone numbers (+49) or hexadecimal numbers.
_NO_NUMBER = r"^(\+|-?0[0-9xX])"
_MANY_DIGITS = r"^-?[0-9]{19,}$"
# Whole numbers that may be above 2**53.
_LARGE = r"^-?[0-9]{16,}$"


def given_types(columns: Mapping[str, str] | None) -> dict[str, pa.DataType]:
    """Return the Arrow types of the option `columns`, of which each value is a :data:`ColumnType`."""
    zoned = {"timestamp[us, UTC]": pa.timestamp("us", "UTC")}
    return {name: zoned.get(type_) or pa.type_for_alias(type_) for name, type_ in (columns or {}).items()}


def widened_by(known: pa.DataType, values: pa.Array, *, numbers: bool = True) -> pa.DataType:
    """Return the narrowest type of a column, from the type of its earlier values and from further values.

    The order of the values and their division into arrays do not matter.

    Args:
        known: Type of the earlier values: null, bool, int64, float64, date32, a timestamp or string.
        values: Array of texts.
        numbers: Whether texts may be numbers or booleans, besides dates and timestamps.
    """
    if pa.types.is_string(known):
        return known
    values = _without_null_words(values).drop_null()
    if not len(values):
        return known
    times = [pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")]
    wider = {
        pa.null(): [*([pa.int64(), pa.float64(), pa.bool_()] if numbers else []), *times],
        pa.int64(): [pa.int64(), pa.float64()],
        pa.date32(): times[:2],
    }
    return next((type_ for type_ in wider.get(known, [known]) if _are(values, type_)), pa.string())


def converted(values: pa.Array, type_: pa.DataType, *, exact: bool = False) -> pa.Array:
    """Convert texts to a type. Raise pa.ArrowInvalid if a text is no value of the type, or, if `exact`, a whole number
    that float64 may round."""
    if pa.types.is_string(type_):
        return values
    if exact and pa.types.is_floating(type_):
        values.filter(pc.match_substring_regex(values, _LARGE)).cast(pa.int64()).cast(type_)
    return pa.nulls(len(values)) if pa.types.is_null(type_) else _without_null_words(values).cast(type_)


def first_wrong(values: pa.Array, type_: pa.DataType, *, exact: bool = False) -> int:
    """Return the index of the first text that :func:`converted` refuses."""
    return first_failing(len(values), lambda start, stop: converted(values[start:stop], type_, exact=exact))


def first_failing(number: int, read: Callable[[int, int], object]) -> int:
    """Return the index of the first of `number` items for which ``read(start, stop)`` of a part raises ArrowInvalid."""
    low, high = 0, number
    while high - low > 1:
        middle = (low + high) // 2
        try:
            read(low, middle)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _without_null_words(values: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_in(values, pa.array(NULL_WORDS)), None, values)


def _are(values: pa.Array, type_: pa.DataType) -> bool:
    if pa.types.is_boolean(type_):
        return bool(pc.all(pc.is_in(pc.utf8_lower(values), pa.array(["true", "false"]))).as_py())
    try:
        values.cast(type_)
        if pa.types.is_integer(type_) or pa.types.is_floating(type_):
            values.filter(pc.match_substring_regex(values, _MANY_DIGITS)).cast(pa.int64())
            return not pc.any(pc.match_substring_regex(values, _NO_NUMBER)).as_py()
    except pa.ArrowInvalid:
        return False
    return True
