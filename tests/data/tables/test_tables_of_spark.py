"""Read tables that Spark has written, with everything that such tables may contain; see ``write_with_spark.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import ValidationError

from shoal.data import DataConnector
from shoal.data.connections import storage_options
from shoal.data.dataset_spec import DatasetSpec, version_of
from shoal.data.iceberg import _path, _query_of
from shoal.errors import DataError
from tests.data.tables.unpacking import cases, plain, unpack

CASES = cases()
READ = {"delta": DataConnector.from_delta, "iceberg": DataConnector.from_iceberg}


def label(case: dict[str, Any]) -> str:
    """Return the name of a case: the table and the version."""
    return "-".join([case["table"], *map(str, case["read"].values())])


def connect(root: Path, case: dict[str, Any], **more: Any) -> DataConnector:
    """Connect to the table of a case."""
    kind, _, name = case["table"].partition("/")
    return READ[kind](root / kind / ("db" if kind == "iceberg" else "") / name, **case["read"], **more)


def rows_of(connector: DataConnector) -> pa.Table:
    """Read all rows."""
    source = connector.source
    tables = list(source.read(source.ranges()))
    return pa.concat_tables(tables) if tables else source.schema().empty_table()


def by_text(rows: list[Any]) -> list[Any]:
    """Sort rows, which may contain nulls and nested values."""
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the tables once."""
    return unpack(tmp_path_factory.mktemp("spark"))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_rows_and_sums_of_a_table_equal_those_of_spark(case: dict[str, Any], root: Path, tmp_path: Path) -> None:
    connector = connect(root, case)
    table = rows_of(connector)

    assert connector.num_rows() == table.num_rows == case["count"]
    assert table.schema.names == list(case["schema"])
    if "rows" in case:
        assert by_text([plain(list(row.values())) for row in table.to_pylist()]) == by_text(case["rows"])
    assert {name: len(table) - table.column(name).null_count for name in table.column_names} == case["valid"]
    for name, expected in case["sums"].items():
        values = table.column(name)
        exact = values.cast(pa.decimal128(38, values.type.scale)) if pa.types.is_decimal(values.type) else values
        assert plain(pc.sum(exact).as_py()) == pytest.approx(expected, nan_ok=True)
    for text, expected in case["filtered"].items():
        filtered = connect(root, case, filters=json.loads(text))
        assert (text, filtered.num_rows(), len(rows_of(filtered))) == (text, expected, expected)
    if table.num_rows:
        parts = connector.random_split([0.7, 0.3], seed=1)
        split = pa.concat_tables([rows_of(part) for part in parts])
        assert by_text(plain(split.to_pylist())) == by_text(plain(table.to_pylist()))
        assert connector.digest() == DataConnector.from_dataframe(table, staging_location=tmp_path).digest()


REFUSED = {
    "iceberg/equality_deletes": ({}, "has equality deletes, .* compact the table first, with rewrite_data_files"),
    "iceberg/avro_files": (
        {},
        "has files in AVRO, and shoal reads only Parquet: set .* write.format.default to parquet",
    ),
    "iceberg/snapshots": ({"version": 1}, r"has no snapshot 1, which may have expired: use one of the newest .*audit"),
    "iceberg/expired": (
        {"version": "gone"},
        r"has no snapshot gone, .* \(\d+ of 2026-.*Z\), or a branch or tag \(main\)",
    ),
    "iceberg/types": ({"as_of": "2020-01-01"}, "has no snapshot as of 2020-01-01, which may have expired"),
    "iceberg/migrated_files": ({}, r"is not an Iceberg table, because it has no file metadata/\*.metadata.json"),
    "delta/variant": ({}, "variantType"),
    "delta/vacuumed": ({"version": 2}, "files of version 2 .* were removed"),
    "delta/checkpoint_v2": ({"version": 99}, "version 99 of the Delta table .* does not exist"),
}


@pytest.mark.parametrize("table", REFUSED)
def test_a_table_that_cannot_be_read_is_refused_with_a_remedy(table: str, root: Path) -> None:
    read, sentence = REFUSED[table]
    with pytest.raises(DataError, match=sentence):
        connect(root, {"table": table, "read": read}).num_rows()


@pytest.mark.parametrize(("table", "files"), [("by_file", "*-deletes.parquet"), ("vectors", "*.puffin")])
def test_a_delete_file_that_was_removed_is_an_error_with_the_snapshots(table: str, files: str, root: Path) -> None:
    found = sorted((root / f"iceberg/db/deletions_{table}").rglob(files))
    moved = [file.rename(file.with_suffix(".moved")) for file in found]
    try:
        with pytest.raises(DataError, match=r"version \d+ .* were removed, .* use one of the newest snapshots"):
            connect(root, {"table": f"iceberg/deletions_{table}", "read": {}}).num_rows()
    finally:
        for hidden, file in zip(moved, found, strict=True):
            hidden.rename(file)


def test_metadata_files_of_an_iceberg_table(root: Path, tmp_path: Path) -> None:
    metadata = root / "iceberg/db/snapshots/metadata"
    assert DataConnector.from_iceberg(metadata / "v2.metadata.json").num_rows() == 10
    (tmp_path / "metadata").mkdir()
    for name in ("00001-a.metadata.json", "00002-b.metadata.json", "00002-c.metadata.json"):
        (tmp_path / "metadata" / name).write_text("{}")
    with pytest.raises(
        DataError, match=r"several newest metadata files \(00002-b\S+, 00002-c\S+\), and only its catalog"
    ):
        DataConnector.from_iceberg(tmp_path).num_rows()
    with pytest.raises(DataError, match="cannot be read with pyiceberg"):
        DataConnector.from_iceberg(tmp_path / "metadata/00001-a.metadata.json").num_rows()


def test_a_file_without_field_ids_needs_a_name_mapping(root: Path, tmp_path: Path) -> None:
    [newest] = sorted((root / "iceberg/db/migrated/metadata").glob("v*.metadata.json"))[-1:]
    without = json.loads(newest.read_text())
    del without["properties"]["schema.name-mapping.default"]
    (tmp_path / "v1.metadata.json").write_text(json.dumps(without))
    with pytest.raises(DataError, match=r"has no field ids, and the table has no property schema.name-mapping.default"):
        DataConnector.from_iceberg(tmp_path / "v1.metadata.json").num_rows()


def test_a_version_that_was_read_is_read_again(root: Path) -> None:
    """After a change of the schema alone, the newest version is the old snapshot in the new schema."""
    [changed] = sorted(
        (root / "iceberg/db/snapshots/metadata").glob("v*.metadata.json"), key=lambda path: len(path.name)
    )[-1:]
    snapshots = DataConnector.from_iceberg(changed.parent.parent)
    first = snapshots.source
    again = DataConnector.from_iceberg(changed.parent.parent, version=first.version)
    assert again.digest() == snapshots.digest() and again.source.version == first.version
    audit = DataConnector.from_iceberg(changed.parent.parent, version="audit")
    assert audit.source.version is not None and "-schema-" in audit.source.version
    pinned = DataConnector.from_iceberg(changed.parent.parent, version=version_of(audit.to_spec())[0])
    assert pinned.source.version == audit.source.version
    assert pinned.schema().names == audit.schema().names == ["id", "y"] and pinned.digest() == audit.digest()


def test_a_catalog_finds_the_table(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg import catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    # pyiceberg reads its configuration when it is imported.
    monkeypatch.setattr(catalog, "_ENV_CONFIG", Config())
    lake = catalog.load_catalog("lake")
    lake.create_namespace("air")
    lake.register_table("air.types", str(root / "iceberg/db/types/metadata/v2.metadata.json"))

    found = DataConnector.from_iceberg("air.types", catalog="lake", filters=[("id", ">", 7)])
    assert found.num_rows() == 6
    spec = found.to_spec()
    assert (spec.catalog, spec.paths, spec.located().paths) == ("lake", ("iceberg://lake/air.types",), spec.paths)
    given = {"format": "iceberg", "catalog": "lake", "paths": ["air.types"], "filters": [["id", ">", 7]]}
    assert DataConnector.from_spec(given).digest() == DataConnector.from_spec(spec).digest() == found.digest()
    with pytest.raises(DataError, match=r"the catalog lake has no table air.other: write namespace.table"):
        DataConnector.from_iceberg("air.other", catalog="lake").num_rows()
    with pytest.raises(DataError, match=r"iceberg://sea/air.types cannot be read with pyiceberg .*SEA__URI"):
        DataConnector.from_iceberg("air.types", catalog="sea").num_rows()


def test_a_spec_of_an_iceberg_table_is_checked() -> None:
    for options, sentence in (
        ({"format": "delta", "catalog": "lake"}, "catalog can be given only for an Iceberg table"),
        ({"format": "delta", "version": "main"}, "the version of a Delta table is a number"),
        ({"format": "iceberg", "version": 1, "as_of": "2024-01-01"}, "version and as_of are both given"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            DatasetSpec.model_validate({"paths": ["/lake/flights"], **options})
    spec = DatasetSpec.model_validate({"format": "iceberg", "paths": ["/lake/flights"], "version": "0123"})
    assert spec.version == "0123" and "catalog" not in spec.model_dump()


def test_files_on_s3_are_read_from_the_server_of_the_catalog() -> None:
    query = _query_of({"s3.endpoint": "http://minio:9000", "s3.region": "eu-west-1", "s3.access-key-id": "key"})
    assert _path("s3a://lake/a=b%20c/x.parquet", query).startswith("s3://lake/a=b%20c/x.parquet?region=eu-west-1&")
    found = {"s3.region": "eu-west-1", "s3.endpoint": "http://minio:9000"}
    assert storage_options("pyiceberg", None, query.removeprefix("?")) == found
    assert _path("file:/lake/a=b%20c/x.parquet", query) == "/lake/a=b%20c/x.parquet" and _query_of({}) == ""
