"""Time ranges of datasets: of which values they are made, and which of them overlap."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from shoal.data import DataConnector
from shoal.data.filters import TimeRange, within


def between(first: Any, last: Any, column: str = "day") -> TimeRange:
    return TimeRange.of(column, (first, last))


MARCH = between(date(2024, 3, 1), date(2024, 3, 31))
NOON = datetime(2024, 3, 31, 12)
BERLIN = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        pytest.param(MARCH, between(date(2024, 4, 1), date(2024, 4, 30)), False, id="the month after"),
        pytest.param(MARCH, between(date(2024, 2, 1), date(2024, 2, 29)), False, id="the month before"),
        pytest.param(MARCH, between(date(2024, 3, 31), date(2024, 4, 30)), True, id="the same last day"),
        pytest.param(MARCH, between(date(2024, 3, 10), date(2024, 3, 11)), True, id="inside"),
        pytest.param(MARCH, between(date(2023, 1, 1), date(2025, 1, 1)), True, id="around"),
        pytest.param(MARCH, between(date(2024, 3, 31), date(2024, 4, 30), "at"), False, id="another column"),
        pytest.param(MARCH, between(NOON, NOON), True, id="a timestamp on the last day"),
        pytest.param(MARCH, between(NOON + timedelta(hours=12), datetime(2024, 5, 1)), False, id="midnight after it"),
        pytest.param(MARCH, between("2024-03-31", "2024-04-30"), True, id="dates as text, as SQLite has them"),
        pytest.param(MARCH, between("2024-03-31 23:59:59", "2024-04-30 00:00:00"), True, id="timestamps as text"),
        pytest.param(between(NOON, NOON), between(NOON, NOON), True, id="one instant"),
        pytest.param(
            between(NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=UTC)),
            between(datetime(2024, 3, 31, 14, tzinfo=BERLIN), datetime(2024, 4, 1, tzinfo=BERLIN)),
            True,
            id="one instant in two time zones",
        ),
        pytest.param(
            between(NOON, NOON),
            between(datetime(2024, 3, 31, 12, 1, tzinfo=BERLIN), datetime(2024, 3, 31, 13, tzinfo=BERLIN)),
            False,
            id="a time without an offset is UTC",
        ),
        pytest.param(between(9, 10), between(10, 11), True, id="numbers"),
        pytest.param(between(9, 10), between(11, 100), False, id="numbers are not compared as text"),
        pytest.param(between(1.5, 2.5), between(2, 3), True, id="numbers of two types"),
        pytest.param(between("2024-W09", "2024-W10"), between("2024-W10", "2024-W11"), True, id="other text"),
        pytest.param(MARCH, between(1, 10**9), False, id="a number and a date"),
        pytest.param(MARCH, between("March", "May"), False, id="a text and a date"),
        pytest.param(MARCH, between("1", "March"), False, id="mixed text"),
    ],
)
def test_overlap(one: TimeRange, other: TimeRange, overlap: bool):
    assert one.overlaps(other) is overlap
    assert other.overlaps(one) is overlap


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        pytest.param(MARCH, between(date(2024, 1, 1), date(2024, 3, 30)), 1, id="a day later"),
        pytest.param(MARCH, between(date(2024, 3, 31), date(2024, 3, 31)), 0, id="the same day"),
        pytest.param(MARCH, between(NOON, NOON), 0, id="a timestamp of the last day"),
        pytest.param(between(NOON, NOON), between(NOON, NOON + timedelta(seconds=1)), -1, id="a second earlier"),
        pytest.param(between(9, 10), between(1, 9), 1, id="numbers"),
        pytest.param(MARCH, between(1, 9), None, id="a number and a date"),
        pytest.param(MARCH, between(date(2024, 3, 1), date(2024, 3, 31), "at"), None, id="another column"),
    ],
)
def test_the_later_end(one: TimeRange, other: TimeRange, order: int | None):
    assert one.compare_ends(other) == order
    assert other.compare_ends(one) == (None if order is None else -order)


@pytest.mark.parametrize(
    ("type_", "values", "inside"),
    [
        (pa.date32(), [date(2024, 3, 31), None, date(2024, 4, 1), date(2024, 3, 1)], [True, True, False, True]),
        (pa.timestamp("us"), [NOON, NOON + timedelta(hours=12), NOON - timedelta(days=60)], [True, False, False]),
        (pa.timestamp("us", "UTC"), [NOON, None], [True, True]),
        (pa.string(), ["2024-03-31 23:59", "2024-04-01", "March", None], [True, False, False, True]),
        (pa.int64(), [20240301, 3], [False, False]),
        (pa.float64(), [float("nan"), None], [False, True]),
    ],
)
def test_values_in_a_range(type_: pa.DataType, values: list[Any], inside: list[bool]):
    column = pa.chunked_array([pa.array(values, type_)])

    assert within(column, [MARCH]).to_pylist() == inside
    assert within(column, [between(1, 2), MARCH]).to_pylist() == inside


def test_numbers_in_one_of_two_ranges():
    column = pa.chunked_array([pa.array([4.0, 1.5, 9.0, 10.0, 2.0], pa.float64())])

    assert within(column, [between(1.5, 3), between(9, 9)]).to_pylist() == [False, True, True, False, True]


@pytest.mark.parametrize(
    ("type_", "values", "first", "last"),
    [
        (pa.date32(), [date(2024, 3, 2), None, date(2024, 3, 1)], "2024-03-01", "2024-03-02"),
        (pa.timestamp("us", "UTC"), [NOON, NOON], "2024-03-31T12:00:00+00:00", "2024-03-31T12:00:00+00:00"),
        (pa.timestamp("ns"), [NOON, NOON], "2024-03-31T12:00:00", "2024-03-31T12:00:00"),
        (pa.int64(), [9, 10], "9", "10"),
        (pa.string(), ["b", "a"], "a", "b"),
    ],
)
def test_the_range_of_a_column(tmp_path, type_, values, first, last):
    parquet.write_table(pa.table({"day": pa.array(values, type_)}), tmp_path / "a.parquet", row_group_size=1)
    connector = DataConnector.from_parquet(tmp_path / "a.parquet")

    found = connector.time_range("day")

    assert found == TimeRange("day", first, last)
    assert found.overlaps(found)
    assert connector.time_range("day", without=[connector.source.footers()[0].path]) is None
    assert connector.time_range() is None
