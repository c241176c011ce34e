"""Profiles of columns: how the values of a sample of rows are distributed, to compare later rows with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.expectations import without_nulls
from shoal.data.parquet.schema import is_number, is_time, plain_type
from shoal.data.parquet.source import ParquetSource
from shoal.data.time_split import time_text
from shoal.lazy_imports import np, pa, pc

_ROWS = 10_000
"""Rows of a sample, if the dataset has so many. Rounding may add one row per row group."""

_MOST_GROUPS, _MOST_VALUES, _MOST_BYTES = 1_000, 32_000_000, 2**28
"""Row groups from which a sample is taken, and values and bytes that are decoded for it, in about 0.6 s."""

_QUANTILES = 10
_CATEGORIES = 20
_LONGEST_TEXT = 100
_TIMES = ("date", "timestamp")
"""Beginnings of the names of the types whose values are times."""

_LEAST_SHARE = 1 / _ROWS
"""Share that counts in place of the share of an empty bin, whose logarithm would be infinite."""


def sample_rows(source: ParquetSource, columns: Sequence[str]) -> pa.Table:
    """Read about 10,000 rows, evenly from all row groups and evenly within each; always the same ones.

    Of long row groups, only the first rows are read.
    """
    ranges, schema = source.ranges(), source.schema()
    # Arrow cannot take rows of views of texts.
    plain = pa.schema([(name, plain_type(schema.field(name).type)) for name in columns])
    if not ranges:
        return plain.empty_table()
    places = np.linspace(0, len(ranges) - 1, min(len(ranges), _MOST_GROUPS), dtype=int)
    chosen = [ranges[place] for place in places]
    step = sum(part.rows for part in chosen) / _ROWS
    heads, every = [], {}
    for part in chosen:
        rows, size = source.footer(part.path).groups[part.row_group]
        most = min(_MOST_VALUES // len(columns), _MOST_BYTES * rows // max(size, 1)) // len(chosen)
        heads.append(part.piece(0, min(part.rows, max(most, 1))))
        every[part.path, part.row_group] = step * heads[-1].rows / part.rows
    taken = []
    for part, table in source.read_pieces(heads, columns):
        count = min(part.rows, -int(-part.rows // every[part.path, part.row_group]))
        taken.append(table.cast(plain).take(pa.array(((np.arange(count) + 0.5) * part.rows / count).astype(np.int64))))
    return pa.concat_tables(taken)


def profile_of(values: pa.ChunkedArray, *, is_category: bool) -> dict[str, Any]:
    """Return the profile of a column, as data for JSON: its type, the share of nulls, and the shares of bins.

    Numbers have ten bins between their quantiles, one below the smallest value, and one above the largest. Texts,
    booleans and categories have a bin for each of the 20 most frequent values, and one for all others. Dates and
    timestamps have one bin below the smallest value, and one for all later ones, because later rows have later times.
    The last bin is for nulls.
    """
    known = without_nulls(values)
    found: dict[str, Any] = {"type": str(values.type)}
    if is_time(values.type):
        found |= {name: time_text(end) for name, end in pc.min_max(known).items() if end.is_valid}
        found["edges"] = [float(np.nextafter(_numbers(known).min(), -np.inf))] if len(known) else []
    elif is_category or not has_numbers(values.type):
        frequent = sorted(Counter(_texts(known)).items(), key=lambda each: (-each[1], each[0]))
        found["values"] = [text for text, _ in frequent[:_CATEGORIES]]
    else:
        numbers = _numbers(known)
        finite = numbers[np.isfinite(numbers)]
        edges: Any = ()
        if len(finite):
            found |= {name: float(getattr(np, name)(finite)) for name in ("min", "max", "mean", "std")}
            lowest, *others = np.quantile(finite, np.linspace(0, 1, _QUANTILES + 1))
            edges = np.unique([np.nextafter(lowest, -np.inf), *others])
        found["edges"] = list(map(float, edges))
    shares = _shares(found, values)
    return {**found, "nulls": shares[-1], "shares": shares}


def stability_index(profile: Mapping[str, Any], values: pa.ChunkedArray) -> float | None:
    """Return the population stability index (PSI) of a column: the sum of (a - e) ln(a / e) over the bins of its
    profile, whose shares are e in the profile and a in other values. It is 0 if the shares are equal.

    Source: N. Siddiqi, Credit Risk Scorecards, 2006, which calls a PSI below 0.1 no change and above 0.25 a large one.

    Returns:
        The index; None if values cannot be compared with the profile: texts with numbers, or times with others.
    """
    if profile["type"].startswith(_TIMES) != is_time(values.type):
        return None
    if "edges" in profile and not (
        has_numbers(values.type) or is_time(values.type) or pa.types.is_boolean(values.type)
    ):
        return None
    expected, actual = (np.maximum(each, _LEAST_SHARE) for each in (profile["shares"], _shares(profile, values)))
    return float(((actual - expected) * np.log(actual / expected)).sum())


def has_numbers(type_: pa.DataType) -> bool:
    """Return whether values of a type are compared as numbers, as those of a column that is null in every row are."""
    plain = plain_type(type_)
    return is_number(plain) or bool(pa.types.is_null(plain))


def _shares(bins: Mapping[str, Any], values: pa.ChunkedArray) -> list[float]:
    """Return the share of values in each bin of a profile; the last one is that of nulls."""
    known = without_nulls(values)
    if "edges" in bins:
        places, size = np.searchsorted(bins["edges"], _numbers(known)), len(bins["edges"])
    else:
        number, size = {text: place for place, text in enumerate(bins["values"])}, len(bins["values"])
        places = np.array([number.get(text, size) for text in _texts(known)], np.int64)
    counts = [*np.bincount(places, minlength=size + 1), len(values) - len(known)]
    return [float(count) / max(len(values), 1) for count in counts]


def _numbers(values: pa.ChunkedArray) -> np.ndarray:
    if is_time(values.type):
        values = values.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    numbers: np.ndarray = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _texts(values: pa.ChunkedArray) -> list[str]:
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())  # so that a column that becomes one of 0 and 1 does not differ
    found: list[str] = pc.utf8_slice_codeunits(values.cast(pa.large_string()), 0, _LONGEST_TEXT).to_pylist()
    return found
