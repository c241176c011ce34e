"""A dataset that is divided by time: the last days are the holdout, the training rows end before a gap."""

from __future__ import annotations

import logging
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.time_split import TimeSplit
from shoal.errors import DataError, InvalidArgumentError

BEGIN = datetime(2024, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred rows, ten a day and in no order of time; the time of one row is not known."""
    made = tmp_path_factory.mktemp("rows")
    order = [i * 77 % 200 for i in range(200)]
    hours = [None if i == 5 else BEGIN + timedelta(hours=2.4 * i) for i in order]
    table = pa.table(
        {
            "row": order,
            "day": [hour and hour.date() for hour in hours],
            "at": pa.array(hours, pa.timestamp("ns")),
            "zoned": pa.array([hour and hour.replace(tzinfo=UTC) for hour in hours], pa.timestamp("us", "Asia/Tokyo")),
            "week": pa.array([i // 70 for i in order], pa.uint8()),
            "view": pa.array([f"row {i}" for i in order], pa.string_view()),
            "code": pa.array([str(i % 3) for i in order]).dictionary_encode(),
        }
    )
    pq.write_table(table.slice(0, 120), made / "a.parquet", row_group_size=30)
    pq.write_table(table.slice(120), made / "b.parquet")
    return made


def values(rows: DataConnector, column: str) -> list[Any]:
    return rows.to_arrow().column(column).to_pylist()


@pytest.mark.parametrize(
    ("column", "holdout", "gap", "last", "first"),
    [
        ("day", 7, 0, date(2024, 1, 13), date(2024, 1, 14)),
        ("day", 7, 1, date(2024, 1, 12), date(2024, 1, 14)),
        ("day", "1w", "2d", date(2024, 1, 11), date(2024, 1, 14)),
        ("at", "12h", 0, BEGIN + timedelta(hours=2.4 * 194), BEGIN + timedelta(hours=2.4 * 195)),
        ("at", 1, "12h", BEGIN + timedelta(hours=2.4 * 184), BEGIN + timedelta(hours=2.4 * 190)),
        ("zoned", 1, 1, None, None),
        ("week", 1, 0, 1, 2),
        ("week", 1, 1, 0, 2),
    ],
)
def test_the_holdout_is_the_end_and_no_training_row_is_in_it_or_in_the_gap(
    folder: Path, column: str, holdout: Any, gap: Any, last: Any, first: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train, held_out = DataConnector.from_parquet(folder).time_split(column, holdout=holdout, gap=gap)
    times, later = values(train, column), values(held_out, column)
    assert max(times) < min(later) and (last is None or (max(times), min(later)) == (last, first))
    rows = {*values(train, "row")}, {*values(held_out, "row")}
    assert {int(text.removeprefix("row ")) for text in values(train, "view")} == rows[0]
    assert rows[0].isdisjoint(rows[1]) and (column == "week" or 5 not in rows[0] | rows[1])
    assert len(rows[0] | rows[1]) == 200 - (column != "week") if gap == 0 else len(rows[0] | rows[1]) < 200
    assert (column == "week") != ("1 of 200 rows" in caplog.text)
    assert sum(part.num_rows() for part in train.random_split([0.5, 0.5])) == len(times)


def test_the_newest_time_is_that_of_the_selected_rows_and_later_files_change_no_part(tmp_path: Path) -> None:
    def write(name: str, *days: int) -> None:
        rows = pa.table({"day": [date(2024, 1, day) for day in days], "x": [*map(float, days)]})
        pq.write_table(rows, tmp_path / f"{name}.parquet")

    write("a", *range(1, 21))
    rows = DataConnector.from_parquet(tmp_path, filters=[("day", "<=", "2024-01-10")])
    train, held_out = rows.time_split("day", holdout=2)
    assert (values(train, "x")[-1], values(held_out, "x")) == (8.0, [9.0, 10.0])
    train, held_out = DataConnector.from_parquet(tmp_path).time_split("day", holdout=2)
    specs = train.to_spec(), held_out.to_spec()
    write("b", 2, 19, 21, 30)
    train, held_out = map(DataConnector.from_spec, specs)
    assert max(values(train, "x")) == 18.0 and sorted(values(held_out, "x")) == [19.0, 19.0, 20.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("row", "1d"), DataError, "whose newest value is 199: of integers give numbers"),
        (("day", "12h"), DataError, "whose newest value is 2024-01-20: of integers give numbers, of dates whole days"),
        (("day", 10_000_000), DataError, "none before the year 1"),
        (("dey", 1), DataError, 'has no column "dey"'),
        (("day", 0), InvalidArgumentError, "holdout must be positive"),
        (("day", "0d"), InvalidArgumentError, "holdout must be positive"),
        (("day", 1, -1), InvalidArgumentError, "gap must not be negative"),
        (("day", "soon"), InvalidArgumentError, "is not a duration"),
    ],
)
def test_a_split_that_does_not_suit_the_column_is_refused(
    folder: Path, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        DataConnector.from_parquet(folder).time_split(*arguments)


def test_numbers_may_be_texts_as_templates_give_them() -> None:
    given = {"column": "week", "holdout": "7", "gap": "1", "until": "12", "part": "train"}
    split = TimeSplit.parse(given)
    assert (split.holdout, split.gap, split.until) == (7, 1, 12)
    assert TimeSplit.parse({**given, "holdout": "12h", "until": "2024-01-31"}).holdout == "12h"


def test_a_date_until_which_timestamps_count_takes_hours(folder: Path) -> None:
    whole = DataConnector.from_parquet(folder)
    split = {"column": "at", "holdout": "12h", "until": "2024-01-04"}
    parts = [{**whole.to_spec().model_dump(), "time_split": {**split, "part": part}} for part in ("train", "holdout")]
    train, held_out = (values(DataConnector.from_spec(DatasetSpec.parse(part)), "at") for part in parts)
    found = [(time - BEGIN) / timedelta(hours=1) for time in (max(train), min(held_out), max(held_out))]
    assert found == [60, 62.4, 72]


def test_a_part_of_a_random_split_and_a_column_without_times_are_not_divided(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [0.5] * 20, "day": pa.nulls(20, pa.date32())}), tmp_path / "a.parquet")
    rows = DataConnector.from_parquet(tmp_path)
    with pytest.raises(InvalidArgumentError, match="call time_split first"):
        rows.random_split([0.5, 0.5])[0].time_split("day", 1)
    with pytest.raises(DataError, match='"x" is of type double, by which rows cannot be divided'):
        rows.time_split("x", 1)
    with pytest.raises(DataError, match='"day" is null in every row'):
        rows.time_split("day", 1)
