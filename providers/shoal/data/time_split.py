"""Divide the rows of a dataset by their time: the last days for the holdout, the days before them for the training."""

from __future__ import annotations

import logging
from datetime import date, datetime, timedelta
from operator import index
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from shoal.data.filters import Filters, builtin_value, check_present, parse_moment
from shoal.data.parquet.schema import is_time
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError, shown
from shoal.lazy_imports import pa, pc
from shoal.option_validation import Settings, duration, optional


def _checked(value: int | str | None) -> int | str | None:
    if isinstance(value, str):
        parse_moment(value, "the time")
    return value


Moment = Annotated[str, BeforeValidator(builtin_value), AfterValidator(_checked)]
"""Type of an option with a time in ISO 8601."""

_IntFirst = Annotated[int | str, Field(union_mode="left_to_right")]
"""Type of an option that is a number or a text. A template of Airflow gives a text, also of a number."""

log = logging.getLogger(__name__)

_ZERO, _HOUR, _DATE_LENGTH = timedelta(), timedelta(hours=1), len("2024-03-31")


class TimeSplit(Settings):
    """One part of a dataset that is divided by time. Rows without a time are in neither part."""

    column: str = Field(min_length=1, description="Column with the time of each row: dates, timestamps or integers.")
    holdout: _IntFirst = Field(
        description="Length of the holdout, which ends with the newest time: a number of days (of a column of "
        "integers: of its units), or a duration such as 12h."
    )
    gap: _IntFirst = Field(
        default=0, description="Length of the time before the holdout whose rows are in neither part, as `holdout`."
    )
    part: Literal["train", "holdout"] = Field(description="Which part the dataset is.")
    until: Annotated[_IntFirst | None, BeforeValidator(builtin_value), AfterValidator(_checked)] = optional(
        "Newest time that counts: a number, or a date or timestamp in ISO 8601. Later rows are in neither "
        "part. None: the newest time in the rows that the filters select when the job's first attempt starts. All "
        "attempts, and all parts of the job that divide the same files by the same column, use this time."
    )

    @field_validator("holdout", "gap")
    @classmethod
    def _legal(cls, value: int | str, info: ValidationInfo) -> int | str:
        length = value if isinstance(value, int) else duration(value) / _HOUR
        if length < 0 or (not length and info.field_name == "holdout"):
            raise ValueError("holdout must be positive, and gap must not be negative")
        return value

    def filters(self, source: ParquetSource) -> Filters:
        """Return the filters that select the part of a dataset. If `until` is None, the column is read.

        Raises:
            DataError: The length of the holdout or of the gap does not suit the column; see also :func:`newest_time`.
        """
        type_ = _type_of(source, self.column)
        until = newest_time(source, self.column) if self.until is None else self.until
        if self.part == "train":
            return (((self.column, "<=", self._before(until, type_, self.holdout, self.gap)),),)
        return (((self.column, ">", self._before(until, type_, self.holdout)), (self.column, "<=", until)),)

    def _before(self, until: int | str, type_: pa.DataType, *steps: Any) -> int | str:
        """Return the time that is some steps before another one, for a column of a type."""
        try:
            if isinstance(until, int):
                return until - sum(map(index, steps))
            step = sum((timedelta(days=each) if isinstance(each, int) else duration(each) for each in steps), _ZERO)
            kind = date if len(until) == _DATE_LENGTH and pa.types.is_date(type_) else datetime
            if kind is date and step % timedelta(days=1):
                raise TypeError
            return (kind.fromisoformat(until) - step).isoformat()
        except (TypeError, OverflowError):
            raise DataError(
                f'holdout={shown(self.holdout)} and gap={shown(self.gap)} do not suit "{self.column}", whose newest '
                f"value is {until}: of integers give numbers, of dates whole days, and none before the year 1"
            ) from None


def newest_time(source: ParquetSource, column: str) -> int | str:
    """Read a column, and return its newest value as `TimeSplit.until`. A warning tells how many rows have no time.

    Raises:
        DataError: There is no such column, its values are no dates, timestamps or integers, or all are null.
    """
    path, type_ = source.reference().path, _type_of(source, column)
    newest, nulls = [], 0
    for _, table in source.read_pieces(source.ranges(), [column]):
        nulls += table.column(0).null_count
        newest.append(pc.max(table.column(0)))
    latest = pc.max(pa.array(newest, type_))
    if not latest.is_valid:
        raise DataError(f'{path}: column "{column}" is null in every row, so the rows cannot be divided by their time')
    if nulls:
        log.warning('%s of %s rows of %s have no "%s" and are in no part', nulls, source.num_rows(), path, column)
    until: int | str = time_text(latest)
    return until


def _type_of(source: ParquetSource, column: str) -> pa.DataType:
    """Return the type of a column by which rows can be divided."""
    path, schema = source.reference().path, source.schema()
    check_present(path, column, schema.names)
    type_ = schema.field(column).type
    if is_time(type_) or pa.types.is_integer(type_):
        return type_
    raise DataError(
        f'{path}: column "{column}" is of type {type_}, by which rows cannot be divided: name a column of dates, '
        "timestamps or integers"
    )


def time_text(value: pa.Scalar) -> Any:
    """Return a date or timestamp as text in ISO 8601, with nanoseconds rounded up, and another value unchanged."""
    if pa.types.is_timestamp(value.type):
        zone = None if value.type.tz is None else "UTC"
        value = pc.ceil_temporal(value.cast(pa.timestamp(value.type.unit, zone)), unit="microsecond")
        value = value.cast(pa.timestamp("us", zone))
    try:
        return builtin_value(value.as_py())
    except OverflowError:  # Python's times end with the year 9999
        return value.cast(pa.string()).as_py()
