"""Find the rows that match filters, using partition values, the statistics of row groups, and the values of the rows.

If the data is sorted, the statistics (smallest and largest value) of most row groups show that all rows or no rows
match. The filter columns of the other row groups are read once to count the rows that match, so that plans, splits and
sizes are exact.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

from shoal.data.filters import Filters, Scalar, Term, check_present, describe_term
from shoal.data.parquet.footers import Footer, open_planned, wrap_read_errors
from shoal.data.parquet.rows_digest import kind_of
from shoal.data.parquet.table_types import read_batches
from shoal.errors import DataError, shown
from shoal.lazy_imports import np, pa, pc

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPUTE = {"<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal"}

_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_TIME_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
"""Name of a time unit in a Parquet file -> name of the same unit in Arrow."""
_DAY_MS = 86_400_000
_FINER_THAN_MICROSECONDS = re.compile(r"[.,]\d{7,}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Smallest value, largest value and number of nulls of a column in one row group, from the footer's statistics.

    Args:
        low: Lower bound of the values that are not null, in the form of :attr:`Comparison.values`; None if unknown.
        high: Upper bound; None if unknown.
        nulls: Number of nulls; None if unknown.
        rows: Number of rows.
    """

    low: Any
    high: Any
    nulls: int | None
    rows: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison of a filter, with its values converted to the type of the column.

    Args:
        operator: "<", "<=", ">", ">=", "in" or "not in".
        values: The value, or the values of "in" and "not in" in ascending order: Python objects that can be compared
            with the statistics of a row group (`Bounds`).
        arrow: The same values as an Arrow array, of the type in which Arrow compares them with rows.
        floating: Whether the column contains floats. In a column of floats, the statistics never exclude a row group
            for "not in", because NaN matches "not in", and the statistics do not show NaN.
    """

    operator: str
    values: tuple[Any, ...]
    arrow: pa.Array
    floating: bool = False

    def decide(self, bounds: Bounds) -> bool | None:
        """Decide from a column's statistics whether all rows or no rows of a row group match this comparison. Return
        None if the statistics are not sufficient.

        Returns:
            True if every row matches, False if no row matches, None if the values must be read to decide.
        """
        if bounds.nulls == bounds.rows or (self.operator == "in" and not self.values):
            return False
        if bounds.low is None or bounds.high is None:
            return None
        # `full` is the result if all values between the minimum and the maximum match. It is True (all rows match) if
        # the row group has no nulls and its column cannot contain NaN. Otherwise it is None (unknown), because nulls
        # match nothing, and the statistics do not show NaN.
        full = True if bounds.nulls == 0 and not self.floating else None
        if self.operator in _ORDER:
            holds, value = _ORDER[self.operator], self.values[0]
            if holds(bounds.low, value) and holds(bounds.high, value):
                return full
            return None if holds(bounds.low, value) or holds(bounds.high, value) else False
        first = bisect_left(self.values, bounds.low)
        inside = first < len(self.values) and self.values[first] <= bounds.high
        single = bounds.low == bounds.high and inside
        if self.operator == "in":
            return full if single else None if inside else False
        if single:
            return None if self.floating else False
        return None if inside else full

    def mask(self, column: pa.Array) -> pa.Array:
        """Return a bool array without nulls that is True for each value of the column that matches."""
        if column.type != self.arrow.type:
            column = column.cast(self.arrow.type)
        if self.operator in _ORDER:
            return pc.call_function(_COMPUTE[self.operator], [column, self.arrow[0]]).fill_null(False)
        if self.floating:
            # The addition converts -0.0 to 0.0, because `is_in` compares bits and would not find -0.0 if the value of
            # the filter is 0.0.
            column = pc.add(column, 0.0)
        found = pc.is_in(column, value_set=self.arrow)
        return found if self.operator == "in" else pc.and_(pc.is_valid(column), pc.invert(found))


class Matcher:
    """Filters that are prepared for one file: the values of the filters are converted to the types of the file's
    columns. A row that the table has deleted matches nothing.

    Args:
        filters: The filters; None if all rows that are not deleted match.
        footer: Footer of the file.
        partitions: Column that the file does not store, such as a partition column -> its value for this file.
    """

    def __init__(self, filters: Filters | None, footer: Footer, partitions: dict[str, pa.Scalar]) -> None:
        self._alternatives: list[list[tuple[str, Comparison]]] = []
        self._footer = footer
        stored = footer.schema.names
        for terms in ((),) if filters is None else filters:
            tests, may_match = [], True
            for term in terms:
                check_present(footer.path, term[0], [*stored, *(name for name in partitions if name not in stored)])
                if term[0] in partitions:
                    may_match &= matches_value(footer.path, term, partitions[term[0]])
                else:
                    tests.append((term[0], prepare(footer.path, term, footer.schema.field(term[0]).type)))
            if may_match:
                self._alternatives.append(tests)
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(name for tests in self._alternatives for name, _ in tests))
        """Names of the columns that must be read to decide which rows match."""
        self._types = {name: footer.schema.field(name).type for name in self.columns}

    def decide(self, metadata: Any, row_group: int) -> bool | None:
        """Decide from a row group's statistics whether all rows or no rows of the row group match the filters. Return
        None if the statistics are not sufficient.

        Returns:
            True if every row that is not deleted matches, False if no row matches, None if the values must be read to
            decide.
        """
        if not self._alternatives:
            return False
        group = metadata.row_group(row_group)
        bounds = {name: Bounds(None, None, None, group.num_rows) for name in self.columns}
        stored = dict(zip(self._footer.stored_names(self.columns), self.columns, strict=True))
        for chunk in map(group.column, range(group.num_columns)):
            name = stored.get(chunk.path_in_schema)
            if name is not None and chunk.is_stats_set:
                stats = chunk.statistics
                nulls = stats.null_count if stats.has_null_count else None
                low, high = (_min_and_max(stats, self._types[name]) if stats.has_min_max else None) or (None, None)
                bounds[name] = Bounds(low, high, nulls, group.num_rows)
        verdicts = []
        for tests in self._alternatives:
            found = [test.decide(bounds[name]) for name, test in tests]
            verdicts.append(False if False in found else None if None in found else True)
        return True if True in verdicts else None if None in verdicts else False

    def mask(self, table: pa.RecordBatch, row_group: int, start: int) -> pa.Array:
        """Return a bool array without nulls that is True for each row of a batch that matches the filters.

        Args:
            table: The batch.
            row_group: The row group that contains the batch.
            start: Position of the batch's first row in the row group.
        """
        deleted = self._footer.deleted_in(row_group)
        either = None
        for tests in self._alternatives:
            every = pc.invert(at_positions(deleted, start, table.num_rows)) if len(deleted) else None
            for name, test in tests:
                found = test.mask(table.column(table.schema.names.index(name)))
                every = found if every is None else pc.and_(every, found)
            either = every if either is None else pc.or_(either, every)
        return either


def count_rows(footer: Footer, metadata: Any, matcher: Matcher) -> list[int]:
    """Count the rows of each row group of a file that match the filters.

    If the statistics of a row group do not show how many rows match, the filter columns of the row group are read.
    """
    counts = []
    unknown = []
    for index, (rows, _) in enumerate(footer.groups):
        verdict = matcher.decide(metadata, index) if rows else False
        counts.append(rows - len(footer.deleted_in(index)) if verdict else 0)
        if verdict is None:
            unknown.append(index)
    if unknown:
        with open_planned(footer) as file:
            for index in unknown:
                with wrap_read_errors(footer.path, f"row group {index}"):
                    batches = read_batches(file, footer, index, matcher.columns)
                    counts[index] = sum(
                        pc.sum(matcher.mask(batch, index, start)).as_py() or 0 for start, batch in batches
                    )
    return counts


def matching_rows(footer: Footer, metadata: Any, matcher: Matcher, row_group: int) -> np.ndarray:
    """Return the positions of the rows of a row group that match the filters, as an int64 array in ascending order."""
    rows = footer.groups[row_group][0]
    verdict = matcher.decide(metadata, row_group) if rows else False
    if verdict is not None:
        return np.delete(np.arange(rows), footer.deleted_in(row_group)) if verdict else np.arange(0)
    with open_planned(footer) as file, wrap_read_errors(footer.path, f"row group {row_group}"):
        batches = read_batches(file, footer, row_group, matcher.columns)
        masks = [matcher.mask(batch, row_group, start) for start, batch in batches]
        return np.flatnonzero(np.concatenate([mask.to_numpy(zero_copy_only=False) for mask in masks]))


def at_positions(positions: np.ndarray, start: int, rows: int) -> pa.Array:
    """Return an Arrow array of booleans ``[rows]`` that is true for each row whose number, plus `start`, is one of the
    ascending `positions`."""
    mask = np.zeros(rows, dtype=bool)
    first, last = np.searchsorted(positions, (start, start + rows))
    mask[positions[first:last] - start] = True
    # The shorter `pa.array(mask)` would import pandas, which is slow.
    return pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(np.packbits(mask, bitorder="little"))])


def prepare(path: str, term: Term, type_: pa.DataType) -> Comparison:
    """Convert the value in one comparison of a filter, such as ``month >= 3``, to the type of the column.

    Whole numbers, dates, timestamps and decimals are compared exactly, even if the value has more digits than the type
    of the column. For floats, the value is rounded to the type of the column, as in pandas. The value 0.1 therefore
    matches a float32 column that was written with the value 0.1.
    """
    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    _, operator_, value = term
    given = value if isinstance(value, tuple) else (value,)
    exact: list[Fraction] = []
    low, high, steps = 0, 0, Fraction(1)
    scalar: Callable[[int], Any] = int
    if types.is_null(type_):
        return Comparison("in", (), pa.array([], pa.null()))
    if kind_of(type_) == "text":
        _check(path, term, type_, given, str, "a text")
        return _comparison(operator_, given, pa.large_string())
    if types.is_floating(type_):
        _check(path, term, type_, given, (int, float), "a number")
        try:
            rounded = tuple(_rounded(float(item), type_) + 0.0 for item in given)
            return _comparison(operator_, rounded, pa.float64(), floating=True)
        except OverflowError:
            raise DataError(
                f"{_cannot(path, term, type_)} with {shown(given)}: give a number that is not too large for a float"
            ) from None
    if types.is_boolean(type_):
        _check(path, term, type_, given, bool, "true or false")
        if operator_ in _ORDER:
            raise DataError(f'{_cannot(path, term, type_)} with "{operator_}": use "=" or "!="')
        return _comparison(operator_, given, pa.bool_())
    if types.is_integer(type_):
        _check(path, term, type_, given, (int, float), "a number")
        exact = [Fraction(item) for item in given]
        bits, signed = type_.bit_width, types.is_signed_integer(type_)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    elif types.is_decimal(type_):
        _check(path, term, type_, given, (int, float), "a number")
        exact = [Fraction(Decimal(str(item))) for item in given]
        steps = Fraction(10) ** type_.scale
        high = 10**type_.precision - 1
        low = -high

        def scalar(step: int) -> Decimal:
            return Decimal((int(step < 0), tuple(map(int, str(abs(step)))), -type_.scale))
    elif types.is_date(type_):
        exact = [Fraction(_days(path, term, type_, item)) for item in given]
        steps = Fraction(1 if types.is_date32(type_) else _DAY_MS)
        low, high = -(2**31), 2**31 - 1
        if not types.is_date32(type_):
            low, high = low * _DAY_MS, high * _DAY_MS
    elif types.is_timestamp(type_):
        exact = [_seconds(path, term, type_, item) for item in given]
        steps = Fraction(_UNITS[type_.unit])
        low, high = -(2**63), 2**63 - 1
    else:
        raise DataError(
            f"{_cannot(path, term, type_)}: filters compare numbers, texts, booleans, dates and timestamps only"
        )
    return _comparison_in_steps(
        operator_, [item * steps for item in exact], low, high, lambda step: pa.scalar(scalar(step), type_)
    )


def matches_value(path: str, term: Term, value: pa.Scalar) -> bool:
    """Return whether the value of a partition column (such as ``month=1``) matches one comparison of a filter."""
    test = prepare(path, term, value.type)
    return value.is_valid and bool(test.mask(pa.array([value.as_py()], value.type))[0].as_py())


def may_match_between(path: str, term: Term, type_: pa.DataType, ends: tuple[Any, Any]) -> bool:
    """Return whether a value of a column of integers, dates or timestamps that is between two bounds may match one
    comparison of a filter."""
    low, high = (pa.scalar(end, type_).value if pa.types.is_temporal(type_) else end for end in ends)
    return prepare(path, term, type_).decide(Bounds(low, high, None, 0)) is not False


def _comparison(operator_: str, values: Sequence[Any], type_: pa.DataType, floating: bool = False) -> Comparison:
    """Build the `Comparison` for one term of a filter, such as ``price < 2.5``, on a column of text, floats or
    booleans.

    The values of such a column need no conversion.
    """
    operator_ = {"=": "in", "!=": "not in"}.get(operator_, operator_)
    ordered = sorted(values)
    return Comparison(operator_, tuple(ordered), pa.array(ordered, type_), floating)


def _comparison_in_steps(
    operator_: str, values: Sequence[Fraction], low: int, high: int, scalar: Callable[[int], pa.Scalar]
) -> Comparison:
    """Build the `Comparison` for one term of a filter, such as ``day < 2024-03-31``, on a column of integers, decimals,
    dates or timestamps.

    The values of such a column are multiples of a step: the smallest unit of the column's type, such as 1, 0.01 or 1
    day. For "<", "<=", ">" and ">=" the filter's value is rounded to a whole number of steps, so that the same rows
    match.
    """
    if operator_ in _ORDER:
        value = values[0]
        below = operator_ in ("<", "<=")
        step = math.floor(value) if operator_ in ("<=", ">") else math.ceil(value)
        step += {"<": -1, ">": 1}.get(operator_, 0)
        if step < low if below else step > high:
            return Comparison("in", (), pa.array([], scalar(0).type))
        step = min(step, high) if below else max(step, low)
        return Comparison("<=" if below else ">=", (step,), pa.array([scalar(step)], scalar(0).type))
    steps = tuple(sorted(int(value) for value in values if value.denominator == 1 and low <= value <= high))
    found = pa.array([scalar(step) for step in steps], scalar(0).type)
    return Comparison("in" if operator_ in ("=", "in") else "not in", steps, found)


def _min_and_max(stats: Any, type_: pa.DataType) -> tuple[Any, Any] | None:
    """Return the smallest and the largest value of a column in a row group; None if its statistics do not contain them.

    The values have the form of :attr:`Comparison.values`.
    """
    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_timestamp(type_):
        # `stats.min_raw` is used, because `stats.min` raises an exception for times outside the years 1 to 9999.
        # `min_raw` is an integer in the file's time unit, so it can be used only if the column has the same unit.
        unit = re.search(r"timeUnit=(\w+)", str(stats.logical_type))
        same = unit is not None and _TIME_UNITS.get(unit[1]) == type_.unit
        return (stats.min_raw, stats.max_raw) if same else None
    if types.is_date32(type_):
        return stats.min_raw, stats.max_raw
    ends = (stats.min, stats.max)
    if types.is_integer(type_) or types.is_boolean(type_):
        return ends if all(isinstance(end, int) for end in ends) else None
    if types.is_floating(type_) and all(isinstance(end, float) and not math.isnan(end) for end in ends):
        return ends
    if types.is_decimal(type_) and all(isinstance(end, Decimal) for end in ends):
        low, high = (int(Fraction(end) * Fraction(10) ** type_.scale) for end in ends)
        return low, high
    return ends if all(isinstance(end, str) for end in ends) else None


def _rounded(value: float, type_: pa.DataType) -> float:
    """Round a number to the precision of a column's float type. A number that is too large for this type is returned
    unchanged."""
    with np.errstate(over="ignore"):
        rounded = float(np.dtype(type_.to_pandas_dtype()).type(value))
    return rounded if math.isfinite(rounded) else value


def _check(path: str, term: Term, type_: pa.DataType, given: Sequence[Scalar], kind: Any, what: str) -> None:
    for item in given:
        # In Python, a bool is also an int, so a bool is refused explicitly if a number is required.
        if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
            raise DataError(f"{_cannot(path, term, type_)} with {shown(item)}: give {what}")


def _cannot(path: str, term: Term, type_: pa.DataType) -> str:
    return (
        f'the filter {describe_term(term)} cannot be applied to {path}, because column "{term[0]}" is of type {type_}, '
        "which cannot be compared"
    )


def _days(path: str, term: Term, type_: pa.DataType, given: Scalar) -> int:
    """Convert an ISO date such as 2024-03-31 to the number of days since 1970-01-01."""
    try:
        if not isinstance(given, str):
            raise ValueError
        return (date.fromisoformat(given) - date(1970, 1, 1)).days
    except ValueError:
        raise DataError(f"{_cannot(path, term, type_)} with {shown(given)}: give a date such as 2024-03-31") from None


def _seconds(path: str, term: Term, type_: pa.DataType, given: Scalar) -> Fraction:
    """Convert an ISO date or timestamp to the exact number of seconds since 1970-01-01."""
    problem = f"{_cannot(path, term, type_)} with {shown(given)}"
    try:
        if not isinstance(given, str) or _FINER_THAN_MICROSECONDS.search(given):
            raise ValueError
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise DataError(
            f"{problem}: give a date or a timestamp such as 2024-03-31T12:00:00, with at most 6 decimals of a second"
        ) from None
    if moment.tzinfo is None:
        # A time without an offset counts as UTC if the column has a time zone.
        moment = moment.replace(tzinfo=UTC)
    elif type_.tz is None:
        raise DataError(f"{problem}: the column has no time zone, so give the time without a UTC offset")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return Fraction((since.days * 86_400 + since.seconds) * 10**6 + since.microseconds, 10**6)
