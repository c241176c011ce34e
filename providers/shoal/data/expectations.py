"""Check before a training whether the selected rows of a dataset are as expected: their number, nulls, ranges, newest
time and unique keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat

from shoal.data.checks import check_same_schema
from shoal.data.filters import Operator, Term, builtin_value, check_present, describe_term, parse_moment
from shoal.data.parquet.filter_matching import prepare
from shoal.data.parquet.schema import is_time, plain_type
from shoal.data.parquet.source import ParquetSource
from shoal.data.time_split import Moment, time_text
from shoal.errors import DataError, shown
from shoal.lazy_imports import np, pa, pc
from shoal.option_validation import Duration, Settings, duration, optional

_KEYS_AT_ONCE = 10_000
"""Number of repeated hashes whose keys are compared in one pass, so that few keys are in memory."""


class RowLimits(Settings):
    """Number of rows of a dataset."""

    min: int | None = Field(default=None, ge=0, description="Smallest number of rows. None: no limit.")
    max: int | None = Field(default=None, ge=0, description="Largest number of rows. None: no limit.")


class Fresh(Settings):
    """Age of the newest row of a dataset."""

    column: str = Field(min_length=1, description="Column of dates or timestamps. A date counts until its last moment.")
    within: Duration = Field(
        description="Largest age of the newest value: hours, days or weeks, such as 36h, 2d or 1w."
    )
    at: Moment | None = optional(
        "Time in ISO 8601 at which the age is measured, UTC without an offset. None: the time at which the "
        "job was created."
    )


class Drift(Settings):
    """Difference between the rows and those on which the champion was trained, by the population stability index
    (PSI)."""

    max: float = Field(gt=0, allow_inf_nan=False, description="Largest PSI of a column, such as 0.25.")
    columns: tuple[str, ...] = Field(
        default=(), description="Columns that are compared. Empty: all input columns and the label."
    )


Bound = Annotated[bool | int | FiniteFloat | str | None, BeforeValidator(builtin_value)]


class Expectations(Settings):
    """What is expected of the rows that a dataset selects. In all of it, NaN counts as null."""

    rows: RowLimits | None = optional("Number of rows.")
    nulls: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default={}, description="Largest share of nulls, from 0 to 1, by column."
    )
    range: dict[str, tuple[Bound, Bound]] = Field(
        default={},
        description="Smallest and largest value by column, such as [0, 100]. null: no limit. Dates and timestamps are "
        "written in ISO 8601. Nulls are in every range.",
    )
    fresh: Fresh | None = optional("Age of the newest row.")
    unique: tuple[str | Annotated[tuple[str, ...], Field(min_length=1)], ...] = Field(
        default=(),
        description="Keys that no two rows share: columns, and lists of columns that are a key together. Nulls are "
        "equal. The check needs 8 bytes of memory per row and key.",
    )
    drift: Drift | None = optional(
        "Largest difference from the champion's training rows. Only the training rows of a job that "
        "registers its model can have it."
    )

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are checked, without duplicates."""
        keys = [name for each in self.unique for name in ((each,) if isinstance(each, str) else each)]
        return list(dict.fromkeys([*self.nulls, *self.range, *([self.fresh.column] if self.fresh else []), *keys]))

    def check_rows(self, source: ParquetSource, place: str, now: float) -> None:
        """Check the rows of a dataset. Each column that is named, and each key, is read once.

        Args:
            source: The rows.
            place: Where the rows are, for the message.
            now: Time in seconds since the epoch at which the age of the newest row is measured, unless `fresh` has one.

        Raises:
            DataError: The rows are not as expected, or a column does not exist. The message names all faults.
        """
        keys = [(each,) if isinstance(each, str) else each for each in self.unique]
        fresh = [self.fresh.column] if self.fresh else []
        singles = list(dict.fromkeys([*self.nulls, *self.range, *fresh]))
        for name in self.columns:
            check_present(source.reference().path, name, source.schema().names)
        rows, faults = source.num_rows(), []
        limits = self.rows or RowLimits()
        if limits.min is not None and rows < limits.min:
            faults.append(f"{rows:,} rows, at least {limits.min:,} expected")
        if limits.max is not None and rows > limits.max:
            faults.append(f"{rows:,} rows, at most {limits.max:,} expected")
        check_same_schema(source, self.columns)
        for name in singles:
            faults += self._faults_of(name, source, rows, now)
        for key in keys:
            faults += _repeated(key, source, rows)
        if faults:
            raise DataError(
                f"the rows of {place} are not as expected: {'; '.join(faults)}. Correct the rows, or change "
                "the expectations"
            )

    def _faults_of(self, name: str, source: ParquetSource, rows: int, now: float) -> Iterator[str]:
        """Read a column, and yield its faults."""
        path, type_ = source.reference().path, source.schema().field(name).type
        limits: Iterable[tuple[Operator, Any]] = zip((">=", "<="), self.range.get(name, ()), strict=False)
        terms: list[Term] = [(name, operator, bound) for operator, bound in limits if bound is not None]
        tests = [(prepare(path, term, type_), term) for term in terms]
        fresh = self.fresh if self.fresh and self.fresh.column == name else None
        if fresh and not is_time(type_):
            raise DataError(
                f'{path}: column "{name}" is of type {type_}, so its values have no age: name a column of dates or '
                "timestamps in fresh"
            )
        present, outside, ends = 0, Counter[Term](), []
        for _, table in source.read_pieces(source.ranges(), [name]):
            values = without_nulls(table.column(0))
            present += len(values)
            for test, term in tests:
                outside[term] += len(values) - (pc.sum(test.mask(values)).as_py() or 0)
            if tests or fresh:
                ends += pc.min_max(values).values()
        nulls, allowed = rows - present, self.nulls.get(name, 1)
        if rows and (share := nulls / rows) > allowed:
            yield f'{nulls:,} of {rows:,} rows have no "{name}" (a share of {share:.3g}, at most {allowed:g} expected)'
        found = pc.min_max(pa.array(ends, ends[0].type)) if ends else {}
        for term in terms:
            if outside[term]:
                low, high = (shown(time_text(end)) for end in found.values())
                yield (
                    f'{outside[term]:,} of {rows:,} rows do not match {describe_term(term)} ("{name}" is from {low} to '
                    f"{high})"
                )
        if fresh:
            at = parse_moment(fresh.at) if fresh.at else datetime.fromtimestamp(now, UTC)
            newest = time_text(found["max"]) if present else None
            longest = duration(fresh.within) + timedelta(days=pa.types.is_date(type_))
            if newest is None or _is_before(found["max"], at, longest):
                yield f'the newest "{name}" is {newest}, more than {fresh.within} before {at.isoformat()}'


def without_nulls(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the plain values of a column without nulls and NaN."""
    # Arrow cannot filter views of texts, and has no `min_max` for float16.
    plain = plain_type(values.type)
    values = values.cast(pa.float32() if pa.types.is_float16(plain) else plain).drop_null()
    return values.filter(pc.invert(pc.is_nan(values))) if pa.types.is_floating(values.type) else values


def _is_before(time: pa.Scalar, at: datetime, longest: timedelta) -> bool:
    """Return whether a date or timestamp, which is UTC if it has no zone, is earlier than `longest` before a time."""
    type_ = pa.timestamp(time.type.unit if pa.types.is_timestamp(time.type) else "s")
    try:
        limit = pa.scalar((at - longest).astimezone(UTC).replace(tzinfo=None), pa.timestamp("us"))
        return bool(pc.less(time.cast(type_), limit.cast(type_, safe=False)).as_py())
    except (OverflowError, pa.ArrowInvalid):  # the limit is before the first time of Python or of the column's type
        return False


def _repeated(columns: Sequence[str], source: ParquetSource, rows: int) -> Iterator[str]:
    """Yield the fault of a key that several rows share. Keys with equal hashes are compared in further passes."""
    hashes = np.fromiter((hash(key) for key in _keys(columns, source)), np.int64, rows)
    hashes.sort()
    repeated = hashes[1:][hashes[1:] == hashes[:-1]]
    candidates = np.unique(repeated)
    for start in range(0, len(candidates), _KEYS_AT_ONCE):
        wanted = set(candidates[start : start + _KEYS_AT_ONCE].tolist())
        key, count = Counter(key for key in _keys(columns, source) if hash(key) in wanted).most_common(1)[0]
        if count > 1:
            yield (
                f"the key ({', '.join(columns)}) is not unique: {len(repeated):,} of {rows:,} rows repeat the key of "
                f"another row, such as {shown(key if len(key) > 1 else key[0])} in {count:,} rows"
            )
            return


def _keys(columns: Sequence[str], source: ParquetSource) -> Iterator[tuple[Any, ...]]:
    """Yield the key of each row. Equal keys are equal as tuples of Python, and have the same hash."""
    for name in columns:
        if pa.types.is_nested(type_ := source.schema().field(name).type):
            raise DataError(f'column "{name}" is of type {type_}, whose values cannot be keys: name other columns')
    for _, table in source.read_pieces(source.ranges(), columns):
        yield from zip(*(_plain(table.column(name)) for name in columns), strict=True)


def _plain(values: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(values.type) and values.type.tz is not None:
        # Two of Python's datetimes with one zone are equal if their clocks show the same time.
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
    found: list[Any] = (values.cast(pa.string()) if pa.types.is_temporal(values.type) else values).to_pylist()
    return found
