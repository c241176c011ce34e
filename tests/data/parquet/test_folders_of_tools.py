"""Folders as pandas, Dask, Polars, DuckDB and Spark write them: rows and index are those of pandas.read_parquet.

The libraries that the development environment does not have are tested in that of the benchmarks:
``make .venv-bench/.installed``, then ``.venv-bench/bin/python -m pytest tests/data/parquet/test_folders_of_tools.py``.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector, ShardedDataConnector
from shoal.data.checks import check_categories, validate_columns
from shoal.data.numpy_columns import as_categories, encoded, find_categories
from shoal.errors import DataError
from tests.data.conftest import Write

KEYS = pd.Index(["p", "q"], name="key")
PAIRS = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", "n"])
HOURS = pd.date_range("2026-10-25", periods=2, freq="h")


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"x": [1.0, 2.0], "y": [1, 2], **columns})


def same_as_pandas(folder: Path) -> pd.DataFrame:
    """Compare all ways to read a folder with pandas.read_parquet. Partition columns are not categorical in shoal."""
    right = pd.read_parquet(folder)
    for name in right.columns[right.dtypes == "category"]:
        right[name] = right[name].astype(right[name].cat.categories.dtype)
    connector = ShardedDataConnector.from_parquet(folder)
    found = connector.to_pandas()
    pd.testing.assert_frame_equal(found, right, check_index_type="equiv")
    pd.testing.assert_frame_equal(connector.to_pandas(limit=1), right.head(1), check_index_type=False)
    pd.testing.assert_frame_equal(pickle.loads(pickle.dumps(connector)).get_shard().to_pandas(), found)
    assert connector.to_arrow().schema == connector.schema()
    return found


@pytest.mark.parametrize(
    ("data", "by"),
    [
        (frame(store=["a", "b"]), ["store"]),
        (frame(store=["a b/c=ä%", "b"], month=[1, 2]), ["store", "month"]),
        (frame(store=pd.array(["a", "b"], "string"), big=pd.array([2**53 + 1, None], "Int64")), ["store"]),
        (frame(store=pd.Categorical(["a", "b"])).set_index(KEYS), ["store"]),
        (frame(flag=[True, False], day=[date(2026, 1, 1), date(2026, 1, 2)], rate=[0.5, 1.5]), ["flag", "day", "rate"]),
    ],
    ids=["text", "two with special characters", "nullable", "categorical with an index", "neither text nor integer"],
)
def test_partition_folders_of_pandas(tmp_path: Path, data: pd.DataFrame, by: list[str]) -> None:
    data.to_parquet(tmp_path, partition_cols=by)
    assert list(same_as_pandas(tmp_path)[by[0]].astype(str))


def test_an_index_that_is_a_partition_folder(tmp_path: Path) -> None:
    pq.write_to_dataset(pa.Table.from_pandas(frame().set_index(KEYS)), tmp_path, partition_cols=["key"])
    found, right = DataConnector.from_parquet(tmp_path).to_pandas(), pd.read_parquet(tmp_path)
    pd.testing.assert_frame_equal(found, right.set_axis(right.index.astype("str")))


def test_a_null_in_a_partition_folder(tmp_path: Path) -> None:
    frame(store=["a", None]).to_parquet(tmp_path, partition_cols=["store"])
    found = DataConnector.from_parquet(tmp_path).to_pandas()  # pandas.read_parquet itself fails
    assert found.sort_values("y").store.fillna("none").tolist() == ["a", "none"]


@pytest.mark.parametrize(
    "files",
    [
        [frame().set_index(KEYS), frame()],
        [frame(), frame().set_index(KEYS)],
        [frame().set_index(KEYS), frame(key=["r", "s"])],
        [frame().set_index(pd.Index([7.5, 3.5])), frame()],
        [frame().set_index(PAIRS), frame(), frame().set_index(PAIRS)],
        [frame().set_axis(pd.RangeIndex(5, 7, name="r")), frame()],
        [frame().set_index(HOURS.tz_localize("Europe/Berlin")), frame().set_index(HOURS.tz_localize("UTC"))],
        [frame(at=HOURS.as_unit("us")), frame(at=HOURS.as_unit("ns")), frame(at=HOURS.as_unit("ms"))],
        [frame(at=HOURS.tz_localize("America/New_York")), frame(at=HOURS.tz_localize("UTC").as_unit("ns"))],
    ],
    ids=[
        "stored, then none", "none, then stored", "index, then column", "unnamed", "several levels", "range, named",
        "zones of the index", "units", "zones and units",
    ],
)  # fmt: skip
def test_files_of_pandas_whose_index_or_times_differ(tmp_path: Path, files: list[pd.DataFrame]) -> None:
    for number, each in enumerate(files):
        each.to_parquet(tmp_path / f"{number}.parquet")
    right = pd.concat([each.reset_index(drop=True) for each in files], ignore_index=True)
    found = DataConnector.from_parquet(tmp_path).to_pandas()
    assert found.y.tolist() == right.y.tolist()
    if "at" in right:  # pandas.read_parquet has the unit of the first file
        assert found["at"].tolist() == right["at"].tolist() and found["at"].dt.unit == "ns"
    else:
        same_as_pandas(tmp_path)


def test_a_named_column_must_be_in_all_files(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    frame().set_index(KEYS).to_parquet(tmp_path / "0.parquet")
    frame().to_parquet(tmp_path / "1.parquet")
    connector = ShardedDataConnector.from_parquet(tmp_path)
    for read in (
        lambda: validate_columns(connector.source, ["key"], "y", categorical_cols=["key"]),
        lambda: connector.get_shard().to_arrow(["key"]),
        lambda: next(iter(connector.to_torch_dataset(columns=["key"]))),
    ):
        with pytest.raises(DataError, match=r'1\.parquet has no column "key"'):
            read()
    frame().set_index(pd.Index([7.5, 3.5], name="key")).to_parquet(tmp_path / "2.parquet")
    differ = r'2\.parquet: column "key" is of type double, but of type large_string in .*0\.parquet'
    with pytest.raises(DataError, match=differ):
        DataConnector.from_parquet(tmp_path).to_arrow()


def test_times_that_a_finer_unit_cannot_hold_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"at": pa.array([datetime(9999, 1, 1)], pa.timestamp("us"))}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"at": pa.array([datetime(2026, 1, 1)], pa.timestamp("ns"))}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r'0\.parquet: column "at" is of type timestamp\[us\], but other files make it'):
        DataConnector.from_parquet(tmp_path).to_arrow()


# Categories from folders: the same value, whatever the other folders are named


@pytest.mark.parametrize(
    ("before", "after", "codes"),
    [
        (["1", "2"], ["1", "2", "abc", "-2"], [0, 1, None, None]),
        (["1", "2"], ["01", "abc", "1.0"], [0, None, None]),
        (["1", "2"], ["abc"], [None]),
        (["1", "abc"], ["1", "2"], [0, None]),
        (["01", "abc"], ["01", "x"], [0, None]),
    ],
)
def test_categories_of_folders_that_gain_or_lose_a_text(
    write: Write, tmp_path: Path, before: list[str], after: list[str], codes: list[int | None]
) -> None:
    for name, values in (("old", before), ("new", after)):
        for value in values:
            write(f"{name}/k={value}/a.parquet", order=[values.index(value)])
    old, new = (DataConnector.from_parquet(tmp_path / name) for name in ("old", "new"))
    known = find_categories(old.source, ["k"])
    check_categories(new.source, {"k": known["k"].type})
    check_categories(new.source, {"k": old.schema().field("k").type})
    found = pa.concat_tables(encoded(table, known) for table in new.iter_batches())
    assert found.sort_by("order")["k"].to_pylist() == codes


def test_wrong_types_of_folders_name_the_folder(write: Write, tmp_path: Path) -> None:
    for value in ("1", "02", "3"):
        write(f"numbers/k={value}/a.parquet", y=[1.0])
        write(f"texts/k={value}/a.parquet", y=[1.0])
    write("texts/k=b/a.parquet", y=[1.0])
    numbers, texts = (DataConnector.from_parquet(tmp_path / name).source for name in ("numbers", "texts"))
    with pytest.raises(DataError, match=r'k=02/a\.parquet: column "k" is of type int32, but .* without leading zeros'):
        check_categories(numbers, {"k": pa.large_string()})
    with pytest.raises(DataError, match=r'k=b/a\.parquet: column "k" is of type string, which cannot be trained on'):
        validate_columns(texts, ["k"], "y")
    write("stored/a.parquet", k=["1"], y=[1.0])
    with pytest.raises(DataError, match=r'a\.parquet: column "k" is of type string.* write the column in the type'):
        check_categories(DataConnector.from_parquet(tmp_path / "stored").source, {"k": pa.int64()})
    assert as_categories(pa.array(["7", "x", None]).dictionary_encode(), pa.int64()).to_pylist() == [7, None, None]


# Other libraries


def dask_folders(folder: Path) -> None:
    dask = pytest.importorskip("dask.dataframe", reason="in the environment of the benchmarks only")
    dask.from_pandas(frame(store=["a", "b"]), npartitions=2).to_parquet(folder / "plain")
    dask.from_pandas(frame(store=["a", "b"]), npartitions=2).to_parquet(folder / "parts", partition_on=["store"])
    dask.from_pandas(frame(), npartitions=1).to_parquet(folder / "no index", write_index=False)


def polars_folders(folder: Path) -> None:
    polars = pytest.importorskip("polars", reason="in no environment: pip install polars")
    table = polars.DataFrame({"x": [1.0, 2.0], "store": ["a", "b"], "at": [datetime(2026, 1, 1)] * 2})
    table.write_parquet(folder / "parts", partition_by=["store"])
    for name in ("plain", "mixed"):
        (folder / name).mkdir()
    table.with_columns(polars.col("store").cast(polars.Categorical)).write_parquet(folder / "plain/0.parquet")
    pd.DataFrame({"x": [0.5], "store": ["c"], "at": HOURS[:1]}, KEYS[:1]).to_parquet(folder / "mixed/0.parquet")
    table.write_parquet(folder / "mixed/1.parquet")


def duckdb_folders(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="in no environment: pip install duckdb")
    duckdb.sql(
        f"COPY (SELECT range::INT AS x, range % 2 AS k, 'a b/' || range % 2 AS s FROM range(4)) "
        f"TO '{folder / 'parts'}' (FORMAT parquet, PARTITION_BY (k, s))"
    )


def compare_with_pandas(folder: Path, **options: Any) -> None:
    right, found = pd.read_parquet(folder, **options), DataConnector.from_parquet(folder).to_pandas()
    found = found.astype(dict.fromkeys(found.columns[found.dtypes == "category"], "str"))
    pd.testing.assert_frame_equal(found, right[found.columns].astype(found.dtypes))


@pytest.mark.parametrize("make", [dask_folders, polars_folders, duckdb_folders])
def test_folders_of_other_libraries(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    for folder in tmp_path.iterdir():
        # Polars writes the column of a partition folder into the files, too, which pandas refuses with partitions.
        compare_with_pandas(folder, partitioning=None if make is polars_folders else "hive")


@pytest.fixture
def spark() -> Iterator[Any]:
    sql = pytest.importorskip("pyspark.sql", reason="in the environment of the benchmarks only")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, such as that of the package openjdk-17-jre-headless")
    builder = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.session.timeZone", "Europe/Berlin").getOrCreate()
    yield session
    session.stop()


@pytest.mark.processes
def test_frames_and_folders_of_spark(spark: Any, tmp_path: Path) -> None:
    rows = spark.sql(
        "SELECT id, id / 7 AS x, timestamp_seconds(id * 3600) AS at, timestamp_ntz'2026-10-25 02:30:00' AS naive, "
        "date'2026-01-01' + CAST(id AS INT) AS day, CAST(id AS DECIMAL(9, 2)) AS price, "
        "IF(id % 2 = 0, 'é', NULL) AS text, array(id, NULL) AS list, struct(id AS a) AS parts FROM range(300)"
    )
    assert DataConnector.from_dataframe(rows).to_arrow() == rows.toArrow()
    assert DataConnector.from_dataframe(rows.where("id < 0")).num_rows() == 0
    flat = rows.select("x", "at", "day", "text", (rows.id % 2).alias("k"))
    flat.write.parquet(str(tmp_path / "plain"))
    flat.na.fill("c:d").write.partitionBy("text", "k").parquet(str(tmp_path / "parts"))
    for folder in tmp_path.iterdir():
        compare_with_pandas(folder)
