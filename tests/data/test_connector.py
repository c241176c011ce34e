"""Connectors: constructors, row order, specs, digests, shards."""

from __future__ import annotations

import json
import pickle
import shutil
import traceback
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from shoal.data import ArrowIngester, DataConnector, RayDataIngester, ShardedDataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet.files import join, split_query
from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import ALONE, GangPosition, plan_shards, set_current_position
from shoal.errors import DataError, InvalidArgumentError

from .conftest import Write


def xs(connector: DataConnector) -> list[int]:
    values: list[int] = connector.to_arrow()["x"].to_pylist()
    return values


# Paths


def test_directory_is_read_in_the_order_of_its_paths(write: Write, tmp_path: Path) -> None:
    for name in ("d/b.parquet", "d/a.parquet", "d/sub/0.parquet"):
        write(name, x=[ord(Path(name).stem)])
    (tmp_path / "d/_SUCCESS").touch()
    (tmp_path / "d/.part.crc").write_text("no data")
    assert xs(DataConnector.from_parquet(tmp_path / "d")) == [97, 98, 48]


def test_list_keeps_its_order_and_glob_is_sorted(write: Write, tmp_path: Path) -> None:
    paths = [write(f"d{i}/f.parquet", x=[i]) for i in (2, 0, 1)]
    assert xs(DataConnector.from_parquet(paths)) == [2, 0, 1]
    assert xs(DataConnector.from_parquet(str(tmp_path / "d[0-1]" / "*.parquet"))) == [0, 1]
    assert xs(DataConnector.from_parquet(f"{tmp_path}/**/f.parquet")) == [0, 1, 2]
    assert xs(DataConnector.from_parquet(f"{tmp_path}/d?")) == [0, 1, 2]
    assert xs(DataConnector.from_parquet(f"file://{paths[0]}")) == [2]


def test_relative_paths_are_made_absolute(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.parquet", x=[1])
    monkeypatch.chdir(tmp_path)
    connector = DataConnector.from_parquet("a.parquet")
    assert connector.to_spec().paths == (str(tmp_path / "a.parquet"),)


def test_names_with_wildcards_in_them_are_found(write: Write) -> None:
    assert xs(DataConnector.from_parquet(write("odd [1]?.parquet", x=[1]))) == [1]


def test_hive_partitions_become_columns(write: Write, tmp_path: Path) -> None:
    write("h/month=1/origin=JFK/a.parquet", x=[1, 2])
    write("h/month=2/origin=New%20ark/a.parquet", x=[3])
    write("h/month=__HIVE_DEFAULT_PARTITION__/origin=LGA/a.parquet", x=[4])
    connector = DataConnector.from_parquet(tmp_path / "h")
    assert connector.schema().field("month").type == pa.int32()
    assert connector.to_arrow().to_pydict() == {
        "x": [1, 2, 3, 4],
        "month": [1, 1, 2, None],
        "origin": ["JFK", "JFK", "New ark", "LGA"],
    }
    [only] = connector.iter_batches(["month"]).__next__().to_pydict().values()
    assert only == [1, 1]


def test_the_file_s_own_column_has_precedence_over_the_path(write: Write) -> None:
    assert xs(DataConnector.from_parquet(write("x=7/a.parquet", x=[1]))) == [1]


def test_fsspec_paths(write: Write) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for month in (1, 2):
        with memory.open(f"/shoal/month={month}/a.parquet", "wb") as file:
            pq.write_table(pa.table({"x": [month]}), file)
    try:
        for path in ("memory://shoal", "memory://shoal/month=*/*.parquet"):
            connector = DataConnector.from_parquet(path)
            assert connector.to_arrow().to_pydict() == {"x": [1, 2], "month": [1, 2]}
            assert [group.path for group in connector.source.row_groups()] == [
                "memory://shoal/month=1/a.parquet",
                "memory://shoal/month=2/a.parquet",
            ]
    finally:
        memory.rm("/shoal", recursive=True)


def test_the_same_file_twice_is_refused(write: Write) -> None:
    path = write("d/a.parquet", x=[1])
    with pytest.raises(InvalidArgumentError, match="in the dataset twice"):
        DataConnector.from_parquet([path, path.parent]).num_rows()


@pytest.mark.parametrize(
    "path",
    [
        "s3://key:cAnArY@bucket/x",
        "s3://key:12/cAnArY+x@bucket/x",
        "s3://bucket/x?secret_key=cAnArY",
        "https://account.blob.core.windows.net/c/x.parquet?sv=2024&sig=cAnArY%3D",
        "https://bucket.s3.amazonaws.com/x.parquet?X-Amz-Signature=cAnArY",
        "https://cAnArY@host/x.parquet",
        " s3://key:cAnArY@bucket/x",
    ],
)
def test_credentials_in_a_path_are_refused(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match="credentials") as info:
        DataConnector.from_parquet(path)
    assert "cAnArY" not in str(info.value)


def test_a_path_that_is_no_uri_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"http://\[::1"):
        DataConnector.from_parquet("http://[::1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:cAnArY@localhost:notaport/db", "port"),
        ("postgresql://me:cAnArY@cAnArY@localhost/db", "%40"),
        ("postgresql://[::1/cAnArY", "port"),
        ("nothing://me:cAnArY@localhost/db", 'dialect "nothing", which is not installed'),
    ],
)
def test_a_wrong_url_of_a_database_is_refused_without_its_password(url: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as info:
        DataConnector.from_sql("SELECT 1", url, staging_location=tmp_path)
    assert "cAnArY" not in "".join(traceback.format_exception(info.value))


def test_options_of_a_uri_and_wildcards_are_told_apart() -> None:
    assert split_query("s3://b/k?region=x&scheme=http") == ("s3://b/k", "?", "region=x&scheme=http")
    for path in ("s3://b/f?/month=1", "s3://b/k", "/local/odd?a=b"):
        assert split_query(path) == (path, "", "")
    assert join("s3://b/k?region=x", "f") == "s3://b/k/f?region=x"


def test_unknown_kind_of_path() -> None:
    with pytest.raises(DataError, match="supports weird:// paths"):
        DataConnector.from_parquet("weird://x/y").num_rows()


@pytest.mark.parametrize("paths", [[], "", 3, [3]])
def test_what_is_no_path_is_refused(paths: object) -> None:
    with pytest.raises((InvalidArgumentError, TypeError)):
        DataConnector.from_parquet(paths)  # type: ignore[arg-type]


# Other constructors


def test_from_dataframe_stages_and_discards(shoal_home: Path) -> None:
    frame = pd.DataFrame({"x": range(100_000), "y": [0.5, None] * 50_000, 3: True}, index=range(5, 100_005))
    connector = ShardedDataConnector.from_dataframe(frame)
    assert connector.staging is not None and Path(connector.staging).parent == shoal_home / "staging"
    assert Path(connector.staging).stat().st_mode & 0o077 == 0
    assert connector.schema().names == ["x", "y", "3"] and connector.to_arrow()["y"].null_count == 50_000
    pd.testing.assert_frame_equal(
        connector.to_pandas(10), frame.set_axis(["x", "y", "3"], axis=1)[:10].reset_index(drop=True)
    )
    assert connector.random_split([0.5, 0.5])[0].to_spec().staging == connector.staging
    assert connector.discard_staging() and not Path(connector.staging).exists()
    assert not connector.discard_staging()


def test_from_dataframe_takes_tables_and_a_location(tmp_path: Path) -> None:
    connector = DataConnector.from_dataframe(pa.table({"x": [1, 2]}), staging_location=tmp_path / "stage")
    assert connector.staging is not None and Path(connector.staging).parent == tmp_path / "stage"
    assert xs(connector) == [1, 2]
    assert xs(DataConnector.from_dataframe(pa.record_batch({"x": [1]}))) == [1]


@pytest.mark.parametrize("method", ["to_arrow", "toArrow"])
def test_from_dataframe_takes_frames_of_snowpark_and_pyspark(method: str) -> None:
    # PySpark has both methods, and the second one fails for some types.
    also = {"__arrow_c_stream__": lambda self, schema=None: pytest.fail("preferred")} if method == "toArrow" else {}
    frame = type("DataFrame", (), {method: lambda self: pa.table({"x": [1, 2]}), **also})()
    assert xs(DataConnector.from_dataframe(frame)) == [1, 2]


def test_the_same_frame_has_the_same_digest() -> None:
    frame = pd.DataFrame({"x": range(1000)})
    assert DataConnector.from_dataframe(frame).digest() == DataConnector.from_dataframe(frame.copy()).digest()


def test_what_cannot_be_staged_is_refused_and_leaves_nothing(shoal_home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='column "x" of the DataFrame cannot be written'):
        DataConnector.from_dataframe(pd.DataFrame({"x": [1, "a", object()]}))
    with pytest.raises(DataError, match='several columns named "x"'):
        DataConnector.from_dataframe(pd.DataFrame([[1, 2]], columns=["x", "x"]))
    with pytest.raises(InvalidArgumentError, match="not list"):
        DataConnector.from_dataframe([1, 2])
    assert list((shoal_home / "staging").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="staging_location="):
        DataConnector.from_dataframe(pd.DataFrame({"x": [1]}), staging_location=tmp_path / "file")


def test_only_staged_directories_are_ever_removed(write: Write) -> None:
    path = write("d/a.parquet", x=[1])
    connector = DataConnector(ParquetSource(path.parent), staging=str(path.parent))
    with pytest.raises(InvalidArgumentError, match="not staged by shoal"):
        connector.discard_staging()
    assert path.exists()
    assert DataConnector.from_parquet(path).discard_staging() is False


def test_from_dataset(write: Write, tmp_path: Path) -> None:
    for month in (1, 2):
        write(f"h/month={month}/a.parquet", 2, x=[month, month, 9])
    hive = pads.dataset(tmp_path / "h", partitioning="hive")
    in_place = DataConnector.from_dataset(hive)
    assert in_place.staging is None and in_place.to_arrow()["month"].to_pylist() == [1, 1, 1, 2, 2, 2]

    filtered = DataConnector.from_dataset(hive.filter(pads.field("x") < 9))
    assert filtered.staging is not None and xs(filtered) == [1, 1, 2, 2]
    [fragment, _] = hive.get_fragments()
    cut = pads.FileSystemDataset([fragment.subset(row_group_ids=[0])], hive.schema, hive.format, hive.filesystem)
    assert xs(DataConnector.from_dataset(cut)) == [1, 1]
    assert xs(DataConnector.from_dataset(pads.dataset(pa.table({"x": [5]})))) == [5]
    renamed = pads.dataset(tmp_path / "h", schema=pa.schema([("x", pa.float64())]))
    assert DataConnector.from_dataset(renamed).schema() == pa.schema([("x", pa.float64())])
    with pytest.raises(InvalidArgumentError, match=r"pyarrow\.dataset\.Dataset"):
        DataConnector.from_dataset("x")


def test_from_sql_streams_and_widens_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.sql.CHUNK_ROWS", 10)
    url = f"sqlite:///{tmp_path / 'x.db'}"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER, late INTEGER, wide)"))
        rows = [{"x": i, "late": None if i < 15 else i, "wide": i if i < 25 else i + 0.5} for i in range(35)]
        connection.execute(sa.text("INSERT INTO t VALUES (:x, :late, :wide)"), rows)
    for connection in (url, engine, engine.connect()):
        connector = DataConnector.from_sql("SELECT * FROM t ORDER BY x", connection)
        assert connector.to_arrow().to_pydict() == {
            "x": list(range(35)),
            "late": [None] * 15 + list(range(15, 35)),
            "wide": [*range(25), *(i + 0.5 for i in range(25, 35))],
        }
    empty = DataConnector.from_sql(sa.text("SELECT x FROM t WHERE x < 0"), engine)
    assert empty.num_rows() == 0 and empty.schema().names == ["x"]
    with pytest.raises(DataError, match="no such table: nope"):
        DataConnector.from_sql("SELECT * FROM nope", engine)
    with pytest.raises(DataError, match="has values of different types"):
        DataConnector.from_sql("SELECT CASE WHEN x < 20 THEN x ELSE 'a' END FROM t ORDER BY x", engine)
    with pytest.raises(DataError, match="several columns"):
        DataConnector.from_sql("SELECT x, late AS x FROM t", engine)
    with pytest.raises(InvalidArgumentError, match="SQLAlchemy URL"):
        DataConnector.from_sql("SELECT 1", 3)


def test_from_sources_joins(write: Write) -> None:
    a, b = write("a.parquet", x=[1]), write("b.parquet", x=[2])
    both = DataConnector.from_sources([ParquetSource(b), a], ingestor_class=RayDataIngester)
    assert xs(both) == [2, 1] and both.ingestor_class is RayDataIngester
    part = both.random_split([0.5, 0.5])[0].source
    assert DataConnector.from_sources(part).num_rows() == 1
    with pytest.raises(InvalidArgumentError, match="combine the sources first"):
        DataConnector.from_sources([part, a])


def test_unknown_ingester_is_refused(write: Write) -> None:
    with pytest.raises(InvalidArgumentError, match="ingestor_class"):
        DataConnector.from_parquet(write("a.parquet", x=[1]), ingestor_class=dict)  # type: ignore[arg-type]


# Specs and digests


def test_spec_round_trip(write: Write) -> None:
    path = write("a.parquet", 30, x=list(range(100)))
    whole = ShardedDataConnector.from_parquet(path, ingestor_class=RayDataIngester)
    part = whole.random_split([0.75, 0.25], seed=3)[1]
    spec = json.loads(part.to_spec().model_dump_json())
    back = DataConnector.from_spec(spec)
    assert type(back) is ShardedDataConnector and back.ingestor_class is RayDataIngester
    assert back.to_spec() == part.to_spec() and xs(back) == xs(part)
    assert back.plan(2, 0) == part.plan(2, 0) and back.digest() == part.digest()
    plain = DataConnector.from_spec(DataConnector.from_parquet(path).to_spec())
    assert type(plain) is DataConnector and plain.ingestor_class is ArrowIngester


def test_spec_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValidationError):
        DatasetSpec.model_validate({"paths": ["/a"], "colour": "red"})
    with pytest.raises(ValidationError):
        DatasetSpec.model_validate({"paths": []})


def test_digest_follows_the_data_not_the_place(write: Write, tmp_path: Path) -> None:
    path = write("a/x.parquet", x=list(range(100)))
    digest = DataConnector.from_parquet(path).digest()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert DataConnector.from_parquet(tmp_path / "b").digest() == digest and len(digest) == 32
    changed = write("c/x.parquet", x=[*range(99), 1000])
    assert changed.stat().st_size == path.stat().st_size
    assert DataConnector.from_parquet(changed).digest() != digest


def test_pickled_connector_needs_no_listing(write: Write, tmp_path: Path) -> None:
    write("d/a.parquet", x=[1])
    connector = DataConnector.from_parquet(tmp_path / "d")
    connector.digest()
    copy = pickle.loads(pickle.dumps(connector))
    write("d/b.parquet", x=[2])
    assert xs(copy) == [1] and copy.digest() == connector.digest()


# Rows


def test_to_pandas_reads_no_more_than_it_needs(write: Write) -> None:
    write("d/a.parquet", 10, x=list(range(20)))
    last = write("d/b.parquet", x=list(range(20, 40)))
    connector = DataConnector.from_parquet(last.parent)
    assert connector.num_rows() == 40
    last.unlink()
    assert connector.to_pandas(15)["x"].tolist() == list(range(15))
    assert len(connector.to_pandas(0)) == 0
    with pytest.raises(InvalidArgumentError, match="negative"):
        connector.to_pandas(-1)


def test_iter_batches_is_in_row_order(write: Write) -> None:
    path = write("a.parquet", 10, x=list(range(25)), y=[0.0] * 25)
    tables = list(DataConnector.from_parquet(path).iter_batches(["y", "x"]))
    assert [table.num_rows for table in tables] == [10, 10, 5]
    assert tables[0].column_names == ["y", "x"] and tables[2]["x"].to_pylist() == list(range(20, 25))


def test_empty_file_alone_and_among_others(write: Write, tmp_path: Path) -> None:
    write("d/0.parquet", x=pa.array([], pa.null()))
    alone = DataConnector.from_parquet(tmp_path / "d")
    assert alone.num_rows() == 0 and alone.to_pandas().empty
    with pytest.raises(DataError, match="no rows"):
        alone.plan(1, 0)
    write("d/1.parquet", x=[1, 2])
    assert xs(DataConnector.from_parquet(tmp_path / "d")) == [1, 2]


def test_get_shard(write: Write) -> None:
    path = write("a.parquet", 10, x=list(range(95)))
    connector = ShardedDataConnector.from_parquet(path)
    assert connector.get_shard().to_arrow()["x"].to_pylist() == list(range(95))
    seen: list[int] = []
    try:
        for rank in range(3):
            set_current_position(GangPosition(rank, 3, seed=1))
            shard = connector.get_shard()
            assert shard.shard == plan_shards(connector.source.row_groups(), 3, 1)[rank] and shard.position.rank == rank
            assert len(shard.to_pandas(4)) == 4
            seen += shard.to_arrow()["x"].to_pylist()
            assert sum(table.num_rows for table in shard.iter_batches(["x"])) == shard.num_rows()
    finally:
        set_current_position(ALONE)
    assert sorted(seen) == list(range(95))
