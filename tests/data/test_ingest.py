"""The Arrow ingester: exactly the planned rows, lean, and errors that name the file."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import ArrowIngester, DataConnector
from shoal.data.numpy_columns import find_categories
from shoal.data.planning import RowRange, Shard
from shoal.errors import DataError, InvalidArgumentError
from tests.support.waiting import wait_until

from .conftest import Write


def test_shards_hold_every_row_once_one_table_per_range(write: Write, tmp_path: Path) -> None:
    for i in range(3):
        write(f"d/{i}.parquet", 70, x=list(range(i * 200, i * 200 + 200)), y=[1.0] * 200)
    connector = DataConnector.from_parquet(tmp_path / "d")
    seen: list[int] = []
    for shard in connector.plan(4, seed=0):
        tables = list(ArrowIngester(connector.source).iter_batches(shard, ["x"]))
        assert [table.num_rows for table in tables] == [part.rows for part in shard.ranges]
        assert all(table.column_names == ["x"] for table in tables)
        seen += [x for table in tables for x in table["x"].to_pylist()]
    assert sorted(seen) == list(range(600))


def test_part_of_a_big_row_group(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.parquet.table_types.BATCH_ROWS", 64)
    path = write("m=5/a.parquet", x=list(range(1000)))
    source = DataConnector.from_parquet(path).source
    for start, stop in [(0, 10), (60, 70), (64, 128), (500, 1000), (999, 1000)]:
        [table] = source.read([RowRange(str(path), 0, start, stop)], ["x", "m"])
        assert table["x"].to_pylist() == list(range(start, stop)) and table["m"].to_pylist() == [5] * (stop - start)
        [table] = source.read([RowRange(str(path), 0, start, stop)], ["m"])
        assert table["m"].to_pylist() == [5] * (stop - start)


def test_a_file_is_opened_once(write: Write) -> None:
    path = write("a.parquet", 10, x=list(range(100)))
    connector = DataConnector.from_parquet(path)
    connector.num_rows()
    with mock.patch("pyarrow.parquet.ParquetFile", wraps=pq.ParquetFile) as opened:
        assert len(list(connector.iter_batches(["x"]))) == 10
    assert opened.call_count == 1 and opened.call_args.kwargs["pre_buffer"] is False


def test_memory_does_not_accumulate(write: Write) -> None:
    rows, group = 400_000, 20_000
    path = write("a.parquet", group, **{f"c{i}": np.random.default_rng(i).random(rows) for i in range(8)})
    connector = DataConnector.from_parquet(path)
    before, peak = pa.total_allocated_bytes(), 0
    for table in connector.iter_batches():
        peak = max(peak, pa.total_allocated_bytes() - before)
        del table
    # A row group decoded is 1.28 MB, the dataset 25.6 MB; one group may be read while the caller lets go of another.
    assert peak < 4 * group * 8 * 8
    # The thread that reads ahead lets go of what it read a moment after the last table is handed out.
    wait_until(lambda: pa.total_allocated_bytes() - before < 1_000_000, "memory of tables is given back")


def test_columns_named_with_dots_and_prefixes(write: Write) -> None:
    path = write("a.parquet", **{"a": [1], "a.b": [2], "n": [{"m": 3}]})
    connector = DataConnector.from_parquet(path)
    assert next(connector.iter_batches(["a"])).to_pydict() == {"a": [1]}
    assert next(connector.iter_batches(["a.b", "n"])).to_pydict() == {"a.b": [2], "n": [{"m": 3}]}


def test_missing_column_at_reading(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1]))
    with pytest.raises(DataError, match=r'a\.parquet has no column "y"'):
        list(connector.iter_batches(["y"]))
    with pytest.raises(InvalidArgumentError, match="columns is empty"):
        list(connector.iter_batches([]))


def test_vanished_file(write: Write) -> None:
    path = write("a.parquet", x=[1])
    connector = DataConnector.from_parquet(path)
    [shard] = connector.plan(1, 0)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.parquet is gone"):
        list(connector.ingester().iter_batches(shard, ["x"]))


def test_file_written_anew_since_the_plan(write: Write) -> None:
    path = write("a.parquet", x=[1, 2])
    connector = DataConnector.from_parquet(path)
    [shard] = connector.plan(1, 0)
    write("a.parquet", x=[1, 2, 3])
    with pytest.raises(DataError, match=r"a\.parquet was changed after .* \(2 rows then, 3 now\)"):
        list(connector.ingester().iter_batches(shard, ["x"]))


@pytest.mark.parametrize(
    "read",
    [
        lambda connector: connector.to_arrow(),
        lambda connector: connector.to_pandas(),
        lambda connector: connector.num_groups("x"),
        lambda connector: find_categories(connector.source, ["x"]),
        lambda connector: list(connector.to_torch_dataset(batch_size=2)),
        lambda connector: list(connector.ingester().iter_batches(connector.plan(2, 0)[1], ["x"])),
        lambda connector: connector.source.matching(connector.source.footers()[0].path, 0, [[("x", ">", 1)]]),
        lambda connector: connector.source.file_digest(connector.source.footers()[0].path),
    ],
    ids=["arrow", "pandas", "groups", "categories", "torch", "worker", "filters", "digest"],
)
def test_file_replaced_by_one_with_as_many_rows_since_the_plan(write: Write, read: Callable[..., object]) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1, 2]))
    connector.num_rows()
    write("a.parquet", x=[1, 2])
    pickle.loads(pickle.dumps(connector)).to_arrow()  # The same bytes, written once more, are the same file.
    write("a.parquet", x=[7, 8])
    with pytest.raises(DataError, match=r"a\.parquet was changed after .* \(another footer now\)"):
        read(pickle.loads(pickle.dumps(connector)))


def test_corrupt_pages_name_file_and_row_group(write: Write) -> None:
    path = write("a.parquet", 5000, x=np.random.default_rng(0).random(10_000))
    connector = DataConnector.from_parquet(path)
    connector.num_rows()
    chunk = connector.source.metadata(str(path)).row_group(1).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start : start + 200] = b"\xff" * 200
    path.write_bytes(raw)
    tables = connector.iter_batches(["x"])
    assert next(tables).num_rows == 5000
    with pytest.raises(DataError, match=r"a\.parquet, row group 1, is corrupt"):
        next(tables)


@pytest.mark.parametrize("content", [b"", b"x", b"month,delay\n1,2\n" * 100, b"PAR1" + b"\0" * 50 + b"PAR1"])
def test_what_is_no_parquet(write: Write, tmp_path: Path, content: bytes) -> None:
    write("d/a.parquet", x=[1])
    (tmp_path / "d/b.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"d/b\.parquet is corrupt or not a Parquet file"):
        DataConnector.from_parquet(tmp_path / "d").plan(1, 0)


def test_truncated_parquet(write: Write) -> None:
    path = write("a.parquet", x=list(range(1000)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet is corrupt"):
        DataConnector.from_parquet(path).num_rows()


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nope does not exist: .* access it\. Relative paths start in .*, the folder"):
        DataConnector.from_parquet("nope").num_rows()
    with pytest.raises(DataError, match="nope does not exist: check the path"):
        DataConnector.from_parquet(tmp_path / "nope").num_rows()
    with pytest.raises(DataError, match="matches no file"):
        DataConnector.from_parquet(tmp_path / "*.parquet").num_rows()
    with pytest.raises(DataError, match="directory without data files"):
        DataConnector.from_parquet(tmp_path).num_rows()
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(DataError, match="is neither a regular file nor a directory, but a named pipe"):
        DataConnector.from_parquet(tmp_path / "pipe.parquet").num_rows()
    with pytest.raises(DataError, match="matches no file"):
        DataConnector.from_parquet(tmp_path / "*.parquet").num_rows()


def test_foreign_range_is_refused(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1]))
    with pytest.raises(DataError, match="does not belong"):
        list(connector.ingester().iter_batches(Shard((RowRange("/other", 0, 0, 1),))))


def test_a_long_row_group_is_read_in_pieces_with_the_same_rows(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("long.parquet", a=np.arange(5_000.0), b=np.arange(5_000) % 7, c=[str(i) for i in range(5_000)])
    connectors = [DataConnector.from_parquet(path, filters=filters) for filters in (None, [("b", "<", 5)])]
    connectors += [part for each in connectors for part in each.random_split([0.6, 0.4], seed=1)]
    shards = [(each, shard) for each in connectors for shard in (*each.plan(3, seed=2), Shard(each.source.ranges()))]
    whole = [list(each.source.read(shard.ranges)) for each, shard in shards]
    for name, limit in (("_LONG_BYTES", 50_000), ("_LARGEST_PIECE", 10_000), ("_PIECE_BYTES", 10_000)):
        monkeypatch.setattr(f"shoal.data.parquet.table_types.{name}", limit)

    for (each, shard), expected in zip(shards, whole, strict=True):
        assert list(each.source.read(shard.ranges)) == expected
        pieces = list(each.ingester().iter_pieces(shard))
        assert pa.concat_tables(table for _, table in pieces) == pa.concat_tables(expected)
        assert len(pieces) > 3 and max(table.num_rows for _, table in pieces) <= 10_000 / (8 + 8 + 64)
        for part, table in pieces:
            assert part.rows == table.num_rows == len(part.positions())
            if each.source.filters is None and not each.source.splits:
                assert [part.row_number(i) for i in range(part.rows)] == table["a"].to_pylist()
