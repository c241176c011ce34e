"""Choose the time column of a dataset, describe the time range of its rows, and check whether two ranges overlap."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_DAY = timedelta(days=1)
_STEP = timedelta(microseconds=1)


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
        mine = [_parse(self.first), _parse(self.last)]
        theirs = [_parse(other.first), _parse(other.last)]
        if len({kind for kind, _, _ in (*mine, *theirs)}) != 1:
            return False
        return bool(mine[0][1] <= theirs[1][2] and theirs[0][1] <= mine[1][2])

    def compare_ends(self, other: TimeRange) -> int | None:
        """Return 1 if this range ends later than the other range, -1 if it ends earlier, and 0 if both ends are equal.

        Times are compared as in :meth:`overlaps`; a date and a timestamp of the same day are equal.

        Returns:
            The order; None if the columns have different names, or if the times cannot be compared.
        """
        mine, theirs = _parse(self.last), _parse(other.last)
        if self.column != other.column or mine[0] != theirs[0]:
            return None
        return int(mine[1] > theirs[2]) - int(mine[2] < theirs[1])


def time_column(candidates: Iterable[str], schema: pa.Schema) -> str | None:
    """Return the only date or timestamp column among some columns of a dataset; None if there are none or several."""
    import pyarrow as pa

    kinds = ((name, schema.field(name).type) for name in candidates)
    times = [name for name, kind in kinds if pa.types.is_date(kind) or pa.types.is_timestamp(kind)]
    return times[0] if len(times) == 1 else None


def within(values: pa.ChunkedArray, ranges: Iterable[TimeRange]) -> pa.ChunkedArray:
    """Return for each value of a time column whether the value is in one of the given ranges.

    A null counts as a value in the ranges, because its time is not known.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    known = pc.unique(values).drop_null()
    if pa.types.is_floating(known.type):
        known = known.filter(pc.is_finite(known))
    known = known.take(pc.sort_indices(known))

    def parsed(index: int) -> tuple[str, Any, Any]:
        return _parse(_text(known[index].as_py()))

    found = pc.is_null(values)
    for each in ranges:
        kind, start, end = _parse(each.first)[0], _parse(each.first)[1], _parse(each.last)[2]
        if pa.types.is_string(known.type) or pa.types.is_large_string(known.type):
            # The order of texts may differ from the order of the times that they stand for.
            texts = [text for text in known.to_pylist() if each.overlaps(TimeRange.of(each.column, (text, text)))]
            found = pc.or_(found, pc.is_in(values, pa.array(texts, known.type)))
        elif len(known) and parsed(0)[0] == kind == _parse(each.last)[0]:
            # Only a few of the values are parsed, because that takes microseconds for each.
            first = bisect_left(range(len(known)), start, key=lambda index: parsed(index)[2])
            after = bisect_right(range(len(known)), end, key=lambda index: parsed(index)[1])
            if first < after:
                inside = pc.and_(pc.greater_equal(values, known[first]), pc.less_equal(values, known[after - 1]))
                found = pc.or_(found, pc.fill_null(inside, False))
    return found


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, date) else str(value)


def _parse(text: str) -> tuple[str, Any, Any]:
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
