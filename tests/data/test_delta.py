"""Delta tables: those that deltalake writes, and logs with what only Spark and Databricks write."""

from __future__ import annotations

import json
import os
import pickle
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import DataError, InvalidArgumentError
from tests.support.delta_tables import add, column, commit, deletion_vector, metadata, protocol


def rows(connector: DataConnector, name: str = "id") -> list[Any]:
    return sorted(connector.to_arrow()[name].to_pylist())


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """Version 0 has two rows on two days, version 1 two more and a new column, version 2 lacks id 1."""
    path = tmp_path / "flights"
    days = pa.array([date(2024, 1, 1), date(2024, 1, 2)])
    at = pa.array([datetime(2024, 1, 1, 12, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC"))
    write_deltalake(
        path, pa.table({"id": [0, 1], "to": ["a b", "c/d"], "day": days, "at": at}), partition_by=["day", "to"]
    )
    table = pa.table({"id": [2, 3], "to": [None, "c/d"], "day": days, "at": at, "delay": [1.5, None]})
    write_deltalake(path, table, mode="append", schema_mode="merge")
    DeltaTable(path).delete("id = 1")
    return path


def test_rows_columns_and_versions(flights: Path) -> None:
    newest = DataConnector.from_delta(flights)
    assert {*newest.schema().names} == {"id", "to", "day", "at", "delay"}
    assert newest.num_rows() == 3 and newest.version == "2"
    by_id = {row.pop("id"): row for row in newest.to_arrow().to_pylist()}
    at = datetime(2024, 1, 1, 12, tzinfo=UTC)
    assert by_id[0] == {"to": "a b", "day": date(2024, 1, 1), "at": at, "delay": None}
    assert by_id[2] == {"to": None, "day": date(2024, 1, 1), "at": at, "delay": 1.5}
    assert by_id[3] == {"to": "c/d", "day": date(2024, 1, 2), "at": at, "delay": None}
    assert rows(DataConnector.from_delta(flights, version=1)) == [0, 1, 2, 3]
    assert {*DataConnector.from_delta(flights, version=0).schema().names} == {"id", "to", "day", "at"}
    source = pickle.loads(pickle.dumps(newest.source))
    assert pa.concat_tables(source.read(source.ranges())) == newest.to_arrow()


def test_filters_leave_out_files_by_partition_and_by_the_log(flights: Path) -> None:
    def found(*filters: tuple[Any, ...]) -> tuple[list[int], int]:
        connector = DataConnector.from_delta(flights, version=1, filters=list(filters))
        return rows(connector), len(connector.source.footers())

    assert found(("day", ">=", "2024-01-02")) == ([1, 3], 2)
    assert found(("to", "in", ["a b", "e"])) == ([0], 1)
    assert found(("id", ">", 2)) == ([3], 1)
    assert found(("at", "<=", "2024-01-01T12:00:00+00:00")) == ([0, 1, 2, 3], 4)
    assert found(("id", ">", 9))[0] == []
    last = pa.table({"at": pa.array([datetime.max, datetime.max.replace(microsecond=0)], pa.timestamp("us", "UTC"))})
    write_deltalake(flights.parent / "last", last)
    filters = [("at", ">=", "9999-12-31T23:59:59.999999")]
    assert rows(DataConnector.from_delta(flights.parent / "last", filters=filters), "at") == [
        datetime.max.replace(tzinfo=UTC)
    ]


def test_a_time_selects_the_newest_version_before_it(flights: Path) -> None:
    for version in range(3):
        log = flights / f"_delta_log/{version:020}.json"
        os.utime(log, (1_700_000_000 + 100 * version,) * 2)
    second = datetime.fromtimestamp(1_700_000_100, UTC)
    for moment, version in ((second, "1"), (second - timedelta(seconds=1), "0"), (second + timedelta(days=999), "2")):
        assert DataConnector.from_delta(flights, as_of=moment).source.version == version
        assert DataConnector.from_delta(flights, as_of=moment.isoformat()).source.version == version
    with pytest.raises(DataError, match=r"no version as of 2001-01-01.*the oldest that still exists is version 0"):
        DataConnector.from_delta(flights, as_of="2001-01-01").schema()
    with pytest.raises(InvalidArgumentError, match="as_of='yesterday' is not a time"):
        DataConnector.from_delta(flights, as_of="yesterday").schema()
    with pytest.raises(InvalidArgumentError, match="version and as_of are both given"):
        DataConnector.from_delta(flights, version=1, as_of="2001-01-01")


def test_times_in_the_commits_count_more_than_those_of_the_files(tmp_path: Path) -> None:
    columns = metadata([column("id", "long")])
    columns["metaData"]["configuration"] = {"delta.enableInCommitTimestamps": "true"}
    for version in range(3):
        moment = {"commitInfo": {"inCommitTimestamp": 1_700_000_000_000 + 1000 * version, "timestamp": 0}}
        start = (protocol("inCommitTimestamp"), columns) if version == 0 else ()
        name = f"{version}.parquet"
        commit(tmp_path, version, moment, *start, add(tmp_path / name, name, pa.table({"id": [version]})))
    at = datetime.fromtimestamp(1_700_000_001.5, UTC)
    assert rows(DataConnector.from_delta(tmp_path, as_of=at)) == [0, 1]
    with pytest.raises(DataError, match="the oldest that still exists is version 0 of 2023-11-14"):
        DataConnector.from_delta(tmp_path, as_of="2023-01-01").schema()


def test_a_spec_describes_the_table(flights: Path) -> None:
    connector = DataConnector.from_delta(flights, version=1, filters=[("id", "<", 2)])
    document = json.loads(connector.to_spec().model_dump_json())
    assert document["format"] == "delta" and document["version"] == 1 and "as_of" not in document
    assert rows(DataConnector.from_spec(document)) == [0, 1]
    assert "version" not in DatasetSpec(paths=("/x",)).model_dump()
    for wrong, message in (
        ({"format": "delta", "paths": ("/x", "/y")}, "needs one path"),
        ({"paths": ("/x",), "version": 1}, "only for a table"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            DatasetSpec(**wrong)


def test_a_table_given_as_parquet_is_refused_with_the_right_call(flights: Path) -> None:
    with pytest.raises(DataError, match=r'use DataConnector.from_delta with .* format="delta" in a spec'):
        DataConnector.from_parquet(flights).num_rows()


def test_versions_that_are_gone_are_an_error_with_those_that_exist(flights: Path) -> None:
    with pytest.raises(DataError, match=r"version 7 of the Delta table .* does not exist.*the versions 0 to 2"):
        DataConnector.from_delta(flights, version=7).schema()
    DeltaTable(flights).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataError, match=r"files of version 1 of .* were removed.*versions 2 to \d+, which"):
        DataConnector.from_delta(flights, version=1).schema()
    table = DeltaTable(flights)
    table.create_checkpoint()
    for version in range(table.version()):
        (flights / f"_delta_log/{version:020}.json").unlink()
    with pytest.raises(DataError, match=rf"version 1 .* its log was removed: .*{table.version()} to {table.version()}"):
        DataConnector.from_delta(flights, version=1).schema()
    (flights / f"_delta_log/{table.version():020}.json").unlink()
    assert rows(DataConnector.from_delta(flights)) == [0, 2, 3]
    with pytest.raises(DataError, match="has no commits in its _delta_log, which as_of needs"):
        DataConnector.from_delta(flights, as_of="2100-01-01").schema()
    with pytest.raises(DataError, match="is not a Delta table, because it has no _delta_log"):
        DataConnector.from_delta(flights.parent).schema()


STRUCT = {"type": "struct", "fields": [column("x", "integer", "col-5", 5)]}
COLUMNS = [column("id", "long", "col-1", 1), column("day", "date", "col-2", 2), column("s", STRUCT, "col-4", 4)]


def mapped(root: Path, mode: str, number: str | None = None) -> None:
    """Write a table with mapped names, two deletion vectors, a narrower type in the files, and odd paths."""
    fields = [
        pa.field("col-1", pa.int32(), metadata={"PARQUET:field_id": "1"}),
        pa.field("col-4", pa.struct([("col-5", pa.int32())]), metadata={"PARQUET:field_id": "4"}),
    ]
    if mode == "id":
        fields = [field.with_name(f"other {i}") for i, field in enumerate(fields)]
    table = pa.table([range(10), [{"col-5": i} for i in range(10)]], schema=pa.schema(fields))
    stats = {"minValues": {"col-1": 0}, "maxValues": {"col-1": 9}, "nullCount": {"col-1": 0}}
    root.mkdir()
    commit(
        root,
        0,
        protocol("deletionVectors", "columnMapping"),
        metadata(COLUMNS, ("day",), mode),
        add(
            root / "day=a b/x%20y.parquet",
            "day=a%20b/x%2520y.parquet",
            table,
            stats,
            partitionValues={"col-2": "2024-01-01"},
            deletionVector=deletion_vector(root, [1, 5]),
        ),
        add(
            root.parent / "elsewhere/z.parquet",
            f"file:{root.parent}/elsewhere/z.parquet",
            table,
            partitionValues={"col-2": None},
            deletionVector=deletion_vector(root, [0], inline=True),
        ),
    )


@pytest.mark.parametrize("mode", ["name", "id"])
def test_mapped_names_deletion_vectors_and_files_elsewhere(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "a table"
    mapped(root, mode)
    found = DataConnector.from_delta(root)
    live = [*(i for i in range(10) if i not in (1, 5)), *range(1, 10)]
    assert found.num_rows() == len(live) and rows(found) == sorted(live)
    assert found.schema().field("id").type == pa.int64()
    assert [value["x"] for value in rows_of(found, "s")] == rows_of(found, "id")
    assert found.value_counts("day") == {date(2024, 1, 1): 8, None: 9}
    assert rows(DataConnector.from_delta(root, filters=[("id", "<", 2), ("day", "=", "2024-01-01")])) == [0]


def rows_of(connector: DataConnector, name: str) -> list[Any]:
    values: list[Any] = connector.to_arrow()[name].to_pylist()
    return values


def test_a_widened_table_keeps_the_values_of_its_old_files(tmp_path: Path) -> None:
    columns = [column("a", "long"), column("b", "double"), column("c", "decimal(13,3)"), column("d", "timestamp_ntz")]
    old = pa.table({"a": pa.array([1], pa.int16()), "b": pa.array([0.5], pa.float32()), "c": pa.array([7], pa.int32())})
    old = old.append_column("d", pa.array([date(2024, 1, 1)]))
    features = protocol("typeWidening", "timestampNtz")
    commit(tmp_path, 0, features, metadata(columns), add(tmp_path / "o.parquet", "o.parquet", old))
    found = DataConnector.from_delta(tmp_path, filters=[("d", "=", "2024-01-01"), ("c", ">=", 7)])
    assert [str(type_) for type_ in found.schema().types] == ["int64", "double", "decimal128(13, 3)", "timestamp[us]"]
    assert [float(value) for value in list(found.to_arrow().to_pylist()[0].values())[:3]] == [1, 0.5, 7]
    assert rows(found, "d") == [datetime(2024, 1, 1)]


@pytest.mark.parametrize("feature", ["variantType", "catalogManaged", "someNewFeature"])
def test_an_unknown_feature_is_refused_by_name(tmp_path: Path, feature: str) -> None:
    file = add(tmp_path / "a.parquet", "a.parquet", pa.table({"id": [1]}))
    commit(tmp_path, 0, protocol(feature), metadata([column("id", "long")]), file)
    known = "catalog-managed" if feature == "catalogManaged" else feature
    with pytest.raises(DataError, match=f"uses .*{known}.*DROP FEATURE"):
        DataConnector.from_delta(tmp_path).schema()
