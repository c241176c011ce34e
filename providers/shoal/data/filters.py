"""Filters of the rows of a dataset, and the time range of its rows."""

from __future__ import annotations

import difflib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, get_args

from shoal.errors import DataError, InvalidArgumentError, shown
from shoal.lazy_imports import pa, pc


def check_present(path: str, name: str, present: Sequence[str]) -> None:
    """Check that a file has exactly one column of a given name."""
    if present.count(name) > 1:
        raise DataError(f'{path} has several columns named "{name}": rename all but one')
    if name in present:
        return
    lower = {column.lower(): column for column in present}
    if near := [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3)]:
        hint = "; did you mean " + " or ".join(f'"{column}"' for column in near) + "?"
    else:
        shown = ", ".join(present[:20]) + (", ..." if len(present) > 20 else "")
        hint = f"; its columns are {shown}" if present else "; it has no columns"
    raise DataError(f'{path} has no column "{name}"{hint}')


def check_unique(names: Sequence[str], found: str = "the data has", hint: str = "rename all but one") -> None:
    """Check that no two columns have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise DataError(f'{found} several columns named "{name}": {hint}')


Operator = Literal["=", "!=", "<", ">", "<=", ">=", "in", "not in"]
Scalar = bool | int | float | str
Term = tuple[str, Operator, Scalar | tuple[Scalar, ...]]
"""One comparison of a filter: (column, operator, value). The value of "in" and "not in" is a tuple of values. A null in
the column matches no term."""

Filters = tuple[tuple[Term, ...], ...]
"""Filters of rows, as a tuple of alternatives. Each alternative is a tuple of terms (comparisons). A row matches the
filters if it matches all terms of at least one alternative."""

OPERATORS: tuple[Operator, ...] = get_args(Operator)

_FORM = 'write filters=[["month", ">=", 3], ["month", "<", 6]], or a list of such lists, which are joined with OR'


def parse_filters(given: Any) -> Filters:
    """Check the filters that the user wrote, and convert them to nested tuples (:data:`Filters`)."""
    if not _is_list(given):
        raise InvalidArgumentError(f"filters must be a list, not {shown(given)}: {_FORM}")
    if not given:
        raise InvalidArgumentError(f"filters is empty: omit filters to read all rows, or {_FORM}")
    if isinstance(given[0], str):
        raise InvalidArgumentError(f"filters={shown(given)} is a single term: put it into a list, [{shown(given)}]")
    # The user may give one list of terms (comparisons), or a list of such lists. In a list of terms, `given[0][0]` is
    # the name of a column. In a list of lists, `given[0][0]` is a term.
    flat = _is_list(given[0]) and bool(given[0]) and isinstance(given[0][0], str)
    alternatives = [given] if flat else given
    parsed = []
    for terms in alternatives:
        if not _is_list(terms) or not terms:
            raise InvalidArgumentError(f"filters has the element {shown(terms)}, which is not a list of terms: {_FORM}")
        parsed.append(tuple(_parse_term(term) for term in terms))
    return tuple(parsed)


def describe_filters(filters: Filters) -> str:
    """Return the filters as a short text for a message, such as ``month >= 3 and month < 6``."""
    return " or ".join(" and ".join(describe_term(term) for term in terms) for terms in filters)


def describe_term(term: Term) -> str:
    """Return one comparison of a filter as a short text for a message, such as ``month >= 3``."""
    column, operator, value = term
    return f"{column} {operator} {shown(list(value) if isinstance(value, tuple) else value)}"


def columns_of(filters: Filters) -> list[str]:
    """Return the names of the columns that the filters compare, without duplicates."""
    return list(dict.fromkeys(column for terms in filters for column, _, _ in terms))


def builtin_value(value: Any) -> Any:
    """Convert a NumPy scalar to a Python object, and a date or datetime to ISO 8601 text. Other values are not
    changed."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    # The check also accepts a datetime, because datetime is a subclass of date.
    return value.isoformat() if isinstance(value, date) else value


def _parse_term(given: Any) -> Term:
    if not _is_list(given) or len(given) != 3:
        raise InvalidArgumentError(f"filters has the term {shown(given)}: a term is [column, operator, value]; {_FORM}")
    column, operator, value = given
    if not isinstance(column, str):
        raise InvalidArgumentError(
            f"filters has the term {shown(given)}: the name of the column must be a text, not {shown(column)}"
        )
    if operator == "==":
        operator = "="
    if operator not in OPERATORS:
        raise InvalidArgumentError(
            f"filters has the term {shown(given)} with the unknown operator {shown(operator)}: use one of "
            f"{', '.join(OPERATORS)}"
        )
    if operator not in ("in", "not in"):
        return column, operator, _parse_scalar(value, given)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | dict):
        raise InvalidArgumentError(
            f'filters has the term {shown(given)}: "{operator}" takes a list of values, not {shown(value)}'
        )
    values = tuple(_parse_scalar(item, given) for item in value)
    # The values of a set are sorted, so that equal sets give equal JSON.
    if isinstance(value, set | frozenset):
        values = tuple(sorted(values, key=lambda item: (str(type(item)), item)))
    if not values:
        raise InvalidArgumentError(f'filters has the term {shown(given)}: "{operator}" needs at least one value')
    return column, operator, values


def _parse_scalar(value: Any, term: Any) -> Scalar:
    if (value := builtin_value(value)) is None:
        raise InvalidArgumentError(
            f"filters has the term {shown(term)}, which compares with null, but no row matches such a comparison: "
            "remove the null from the list of values, or remove the term. A term with any other value leaves out the "
            "rows with null, as != -1 does if no row has -1"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgumentError(f"filters has the term {shown(term)}: a value must be finite, not {value}")
    if isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        f"filters has the term {shown(term)}: a value must be a bool, a number, a text, a date or a datetime, not "
        f"{type(value).__name__}"
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DAY = timedelta(days=1)
_STEP = timedelta(microseconds=1)


def parse_moment(text: str, option: str = "as_of") -> datetime:
    """Parse an option with a time in ISO 8601, which is UTC if it has no offset."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{option}={shown(text)} is not a time: write ISO 8601, such as 2024-03-31T12:00:00+00:00"
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Smallest and largest time of the rows of a dataset. The range includes both times.

    Args:
        column: Name of the time column.
        first: Smallest time as text: ISO 8601 for dates and timestamps.
        last: Largest time as text.
    """

    column: str
    first: str
    last: str

    @classmethod
    def of(cls, column: str, ends: tuple[Any, Any]) -> TimeRange:
        """Create a time range from the smallest and the largest value of a column. The values are Python objects."""
        first, last = map(_text, ends)
        return cls(column, first, last)

    def __str__(self) -> str:
        return f"{self.column} from {self.first} to {self.last}"

    def overlaps(self, other: TimeRange) -> bool:
        """Return whether the two ranges have a time in common.

        A date counts as the whole day, and a timestamp without an offset counts as UTC. The result is False if the
        columns have different names, or if the times cannot be compared, such as a number and a date.
        """
        if self.column != other.column:
            return False
        mine = [parse_time(self.first), parse_time(self.last)]
        theirs = [parse_time(other.first), parse_time(other.last)]
        if len({kind for kind, _, _ in (*mine, *theirs)}) != 1:
            return False
        return bool(mine[0][1] <= theirs[1][2] and theirs[0][1] <= mine[1][2])

    def compare_ends(self, other: TimeRange) -> int | None:
        """Return 1 if this range ends later than the other range, -1 if it ends earlier, and 0 if both ends are equal.

        Times are compared as in :meth:`overlaps`; a date and a timestamp of the same day are equal.

        Returns:
            The order; None if the columns have different names, or if the times cannot be compared.
        """
        mine, theirs = parse_time(self.last), parse_time(other.last)
        if self.column != other.column or mine[0] != theirs[0]:
            return None
        return int(mine[1] > theirs[2]) - int(mine[2] < theirs[1])


def time_column(candidates: Iterable[str], schema: pa.Schema) -> str | None:
    """Return the only date or timestamp column among some columns of a dataset; None if there are none or several."""
    kinds = ((name, schema.field(name).type) for name in candidates)
    times = [name for name, kind in kinds if pa.types.is_date(kind) or pa.types.is_timestamp(kind)]
    return times[0] if len(times) == 1 else None


def within(values: pa.ChunkedArray, ranges: Iterable[TimeRange]) -> pa.ChunkedArray:
    """Return for each value of a time column whether the value is in one of the given ranges.

    A null counts as a value in the ranges, because its time is not known.
    """
    known = pc.unique(values).drop_null()
    if pa.types.is_floating(known.type):
        known = known.filter(pc.is_finite(known))
    known = known.take(pc.sort_indices(known))

    def parsed(index: int) -> tuple[str, Any, Any]:
        return parse_time(_text(known[index].as_py()))

    found = pc.is_null(values)
    for each in ranges:
        kind, start, end = parse_time(each.first)[0], parse_time(each.first)[1], parse_time(each.last)[2]
        if pa.types.is_string(known.type) or pa.types.is_large_string(known.type):
            # The order of texts may differ from the order of the times that they stand for.
            texts = [text for text in known.to_pylist() if each.overlaps(TimeRange.of(each.column, (text, text)))]
            found = pc.or_(found, pc.is_in(values, pa.array(texts, known.type)))
        elif len(known) and parsed(0)[0] == kind == parse_time(each.last)[0]:
            # Only a few of the values are parsed, because that takes microseconds for each.
            first = bisect_left(range(len(known)), start, key=lambda index: parsed(index)[2])
            after = bisect_right(range(len(known)), end, key=lambda index: parsed(index)[1])
            if first < after:
                inside = pc.and_(pc.greater_equal(values, known[first]), pc.less_equal(values, known[after - 1]))
                found = pc.or_(found, pc.fill_null(inside, False))
    return found


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def parse_time(text: str) -> tuple[str, Any, Any]:
    """Parse a value of a time column. Return its kind ("number", "time" or "text"), and the start and the end of the
    range that the text stands for.

    A date stands for all times of the day, from its beginning to its end. Any other text stands for one value.
    """
    try:
        number = Decimal(text)
        return ("number", number, number) if number.is_finite() else ("text", text, text)
    except InvalidOperation:
        pass
    try:
        moment = datetime.fromisoformat(text)
        utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        return "time", utc, utc + _DAY - _STEP if _DATE.fullmatch(text) else utc
    except (ValueError, OverflowError):
        # datetime raises OverflowError for a moment outside the years 1 to 9999.
        return "text", text, text
