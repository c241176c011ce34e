"""Files of a table: a lister says which files, names, types, partition values and deleted rows the table has."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.checks import check_no_nulls, validate_columns
from shoal.data.filters import Filters, parse_filters
from shoal.data.listing import DataFile, Listing
from shoal.data.parquet.footers import FIELD_ID, NAMES_IN_FILES
from shoal.data.parquet.overlap import RecordedFile, record_rows, shared_mask, shared_rows
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError

ROWS = 100


@dataclass
class Listed:
    """Lister of the files that a test has written."""

    listing: Listing
    place: str = "the test's table"

    def list_files(self, filters: Filters | None) -> Listing:
        return self.listing


def connector(listing: Listing, *filters: tuple[Any, ...]) -> DataConnector:
    parsed = parse_filters(list(filters)) if filters else None
    return DataConnector(ParquetSource("/table", filters=parsed, lister=Listed(listing)))


def file(path: Path, table: pa.Table, group: int = 30, **options: Any) -> DataFile:
    pq.write_table(table, path, row_group_size=group)
    return DataFile(str(path), path.stat().st_size, **options)


def column(name: str, type_: pa.DataType, number: int, *names: str) -> pa.Field:
    """A column of a table, with its id, and its names in files without ids."""
    return pa.field(name, type_, metadata={FIELD_ID: str(number), NAMES_IN_FILES: json.dumps(names)})


SCHEMA = pa.schema(
    [
        column("id", pa.int64(), 0, "col-1", "id"),
        column("price", pa.float64(), 1, "col-2", "price"),
        column("at", pa.timestamp("us", "UTC"), 2, "col-3", "at"),
        column("note", pa.string(), 3, "note"),
        ("day", pa.date32()),
        ("rate", pa.decimal128(10, 2)),
    ]
)


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    """An old file with narrow types, other names and no notes, and a new file with field ids; of each, rows are
    deleted."""
    ids, times = np.arange(ROWS, dtype=np.int32), pa.array([datetime(2024, 1, 1)] * ROWS, pa.timestamp("us"))
    old = pa.table({"col-1": ids, "col-2": ids.astype(np.float32), "col-3": times, "gone": ids})
    fields = [pa.field(name, SCHEMA.field(name).type) for name in ("id", "price", "at", "note")]
    numbered = [
        pa.field(f"renamed {field.name}", field.type, metadata={"PARQUET:field_id": str(i)})
        for i, field in enumerate(fields)
    ]
    values = [np.arange(ROWS, 2 * ROWS), np.arange(ROWS) * 1.0, [datetime(1, 1, 1, tzinfo=UTC)] * ROWS, ["a"] * ROWS]
    new = pa.table(
        [pa.array(each, field.type) for each, field in zip(values, fields, strict=True)], schema=pa.schema(numbered)
    )
    days = [{"day": date(2024, 1, 1), "rate": Decimal("1.50")}, {"day": None, "rate": Decimal("2.00")}]
    return Listing(
        (
            file(tmp_path / "1", old, partitions=days[0], deleted=np.array([0, 31, 99], np.uint32)),
            file(tmp_path / "2", new, partitions=days[1], deleted=np.arange(30, 60, dtype=np.uint64)),
        ),
        SCHEMA,
        "7",
    )


LIVE = [*(i for i in range(ROWS) if i not in (0, 31, 99)), *range(100, 130), *range(160, 200)]


def test_a_table_is_read_in_its_own_names_and_types(listing: Listing) -> None:
    found = connector(listing)
    source = pickle.loads(pickle.dumps(found.source)) if found.source.footers() else None
    assert source is not None and source.version == "7"
    table = found.to_arrow()
    assert table.schema == found.schema() == SCHEMA
    assert pa.concat_tables(source.read(source.ranges())) == table
    assert table["id"].to_pylist() == LIVE and found.num_rows() == len(LIVE)
    assert table["at"].to_pylist()[:: len(LIVE) - 1] == [
        datetime(2024, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=UTC),
    ]
    assert table["note"].to_pylist() == [None] * 97 + ["a"] * 70
    assert table["day"].to_pylist() == [date(2024, 1, 1)] * 97 + [None] * 70
    assert found.value_counts("day") == {date(2024, 1, 1): 97, None: 70}
    assert found.value_counts("rate") == {Decimal("1.50"): 97, Decimal("2.00"): 70}


@pytest.mark.parametrize(
    ("terms", "matching"),
    [
        ([("id", ">=", 20), ("id", "<", 120)], [i for i in LIVE if 20 <= i < 120]),
        ([("note", "=", "a")], [i for i in LIVE if i >= 100]),
        ([("note", "!=", "a")], []),
        ([("day", "=", "2024-01-01"), ("price", "<=", 31)], [i for i in LIVE if i <= 31]),
        ([("rate", ">", 1.5)], [i for i in LIVE if i >= 100]),
        ([("at", "<", "1600-01-01T00:00:00+01:00")], [i for i in LIVE if i >= 100]),
    ],
)
def test_filters_compare_the_table_s_values_and_match_no_deleted_row(
    listing: Listing, terms: list[tuple[Any, ...]], matching: list[int]
) -> None:
    found = connector(listing, *terms)
    assert found.num_rows() == len(matching)
    assert found.to_arrow()["id"].to_pylist() == matching


def test_plans_and_splits_count_only_rows_that_are_left(listing: Listing) -> None:
    found = connector(listing)
    shards = found.plan(3, seed=0)
    rows = [
        row for shard in shards for table in found.source.read(shard.ranges, ["id"]) for row in table["id"].to_pylist()
    ]
    assert sorted(rows) == LIVE and [shard.rows for shard in shards] == [56, 56, 55]
    parts = found.random_split([0.5, 0.5])
    assert sorted(row for part in parts for row in part.to_arrow()["id"].to_pylist()) == LIVE


def test_the_digest_is_that_of_the_rows_in_any_files(listing: Listing, tmp_path: Path) -> None:
    rows = connector(listing).to_arrow()
    compacted = file(tmp_path / "3", rows, group=1000)
    assert connector(Listing((compacted,), SCHEMA, "8")).digest() == connector(listing).digest()
    assert connector(listing).write_times() == ()


def test_checks_use_the_table_s_schema(listing: Listing) -> None:
    source = connector(listing).source
    validate_columns(source, ["id", "price", "rate"])
    check_no_nulls(source, "id")
    with pytest.raises(DataError, match='"note" is null in 30 of 30 rows'):
        check_no_nulls(source, "note")
    with pytest.raises(DataError, match='no column "prize"; did you mean "price"'):
        validate_columns(source, ["prize"])
    empty = connector(Listing((), SCHEMA, "0"))
    assert empty.to_arrow() == SCHEMA.empty_table()
    with pytest.raises(DataError, match="the dataset has no rows: the test's table has no files"):
        validate_columns(empty.source, ["id"])


def test_a_default_is_the_value_of_rows_that_are_older_than_the_column(listing: Listing) -> None:
    with_default = Listing(listing.files, SCHEMA, "7", {"note": "none"})
    assert connector(with_default, ("note", "=", "none")).num_rows() == 97


def test_fields_of_structs_are_renamed_added_and_widened_too(tmp_path: Path) -> None:
    def struct(*fields: tuple[str, pa.DataType, int]) -> pa.DataType:
        return pa.struct([pa.field(name, type_, metadata={"PARQUET:field_id": str(i)}) for name, type_, i in fields])

    stored = struct(("a", pa.int32(), 7), ("b", pa.string(), 8))
    wanted = struct(("b", pa.int64(), 7), ("a", pa.string(), 8), ("c", pa.float64(), 9))
    values = [{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]
    expected = [{"b": 1, "a": "x", "c": None}, None, {"b": None, "a": "y", "c": None}]
    columns = {"one": pa.array(values, stored), "many": pa.array([values, None, []], pa.list_(stored))}
    columns["named"] = pa.array([[("k", values[0])], None, []], pa.map_(pa.string(), stored))
    schema = pa.schema(
        [("one", wanted), ("many", pa.list_(wanted)), ("named", pa.map_(pa.string(), wanted))],
    )
    found = connector(Listing((file(tmp_path / "x", pa.table(columns)),), schema)).to_arrow()
    assert found["one"].to_pylist() == expected
    assert found["many"].to_pylist() == [expected, None, []]
    assert found["named"].to_pylist() == [[("k", expected[0])], None, []]


def test_rows_that_were_deleted_later_still_overlap(listing: Listing) -> None:
    def shared(then: DataConnector, now: DataConnector) -> list[int]:
        recorded = [RecordedFile.from_json(each.to_json()) for each in record_rows(then.source)]
        mask = shared_mask(recorded, now.source)
        assert sum(file.rows for file in shared_rows(recorded, now.source)) == mask.sum()
        return [row for row, is_shared in zip(now.to_arrow()["id"].to_pylist(), mask, strict=True) if is_shared]

    def without(deleted: np.ndarray | None) -> Listing:
        first = listing.files[0]
        return Listing((DataFile(first.path, first.size, None, first.partitions, deleted),), SCHEMA, "9")

    before, after = connector(listing, ("id", "<", 50)), connector(without(np.arange(40, 45)))
    assert shared(before, connector(listing)) == [i for i in LIVE if i < 50]
    assert shared(before, after) == [i for i in range(50) if not 40 <= i < 45]
    assert shared(after, before) == [i for i in LIVE if i < 50]
    assert shared(connector(without(None), ("id", "<", 50)), after) == [i for i in range(50) if not 40 <= i < 45]
    one, other = connector(listing, ("id", "<", 50)).random_split([0.5, 0.5])
    assert shared(one, other) == []
    assert shared(one, after) == [i for i in range(ROWS) if i < 60 and not 40 <= i < 45]
    # A column gets another name and a comment, and a partition column is added.
    old, cost = listing.files[0], column("cost", pa.float64(), 1, "col-2").with_nullable(False)
    renamed = replace(old, partitions={**old.partitions, "new": None})
    schema = pa.schema([*SCHEMA.set(1, cost), pa.field("new", pa.int64())])
    assert shared(before, connector(Listing((renamed,), schema))) == [i for i in LIVE if i < 50]
