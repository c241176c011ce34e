"""Drivers whose cursors return Arrow data: their types and errors, and rows if they refuse."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from shoal.data.sql import stage_query, stage_select
from shoal.errors import DataAccessError

ROWS = 100_000
SELECT = "SELECT id, name FROM trips ORDER BY id"
TYPES = pa.schema([("ID", pa.int16()), ("NAME", pa.large_string())])


class ArrowCursor(sqlite3.Cursor):
    """A cursor with the methods of three drivers. Python's methods and those for Arrow take rows of the same result."""

    fails_after: int | None = None
    """Number of rows after which the server is gone."""
    batch_rows = 40_000

    def _batch(self, rows: int) -> pa.Table:
        found = self.fetchmany(rows)
        if self.fails_after is not None and (not found or found[-1][0] >= self.fails_after):
            raise RuntimeError("connection reset\nwhile SELECT 'secret'")
        ids, names = list(zip(*found, strict=True)) or [[], []]
        return pa.table([pa.array([x % 9 for x in ids], pa.int16()), pa.array(names, pa.large_string())], schema=TYPES)

    def fetch_arrow_batches(self) -> Iterator[pa.Table]:
        while table := self._batch(self.batch_rows):
            yield table

    def fetchmany_arrow(self, size: int) -> pa.Table:
        return self._batch(size)

    @property
    def query_job(self) -> ArrowCursor:
        return self

    def result(self) -> ArrowCursor:
        return self

    def to_arrow_iterable(self, client: object) -> Iterator[pa.RecordBatch]:
        assert client == "client of the Storage API"
        while table := self._batch(self.batch_rows):
            yield from table.to_batches()


class Connection(sqlite3.Connection):
    _bqstorage_client = "client of the Storage API"

    def cursor(self, factory: Any = ArrowCursor) -> Any:
        return super().cursor(factory)


@pytest.fixture(params=["snowflake", "databricks", "bigquery"])
def engine(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sa.Engine:
    path = tmp_path / "warehouse.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE trips (id INTEGER, name TEXT)")
        database.executemany("INSERT INTO trips VALUES (?, ?)", [(i, f"n{i}") for i in range(ROWS)])
    database.close()
    engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(path, factory=Connection))
    engine.dialect.name = request.param
    monkeypatch.setattr("shoal.data.sql._engine", lambda url, **options: engine)
    return engine


def test_rows_have_the_types_of_the_server(engine: sa.Engine, tmp_path: Path) -> None:
    for columns, names in ((None, ["id", "name"]), (["name"], ["name"])):
        assert stage_select(SELECT, {}, "sqlite://", str(tmp_path), columns=columns) == ROWS
        found = pq.read_table(tmp_path / "part-00000.parquet")
        assert found.schema.names == names
        assert found.schema.field("name").type == pa.large_string()
        assert found["name"].to_pylist()[::9999] == [f"n{i}" for i in range(0, ROWS, 9999)]
    assert stage_select("SELECT id, name FROM trips WHERE id < 0", {}, "sqlite://", str(tmp_path)) == 0


def test_nothing_is_kept_if_the_server_dies(engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArrowCursor, "fails_after", 90_000)
    with pytest.raises(DataAccessError) as caught:
        stage_query(SELECT, engine, tmp_path / "staging")
    assert str(caught.value) == "the query failed: connection reset"
    assert list((tmp_path / "staging").iterdir()) == []


def test_rows_come_as_before_if_the_driver_returns_no_arrow_data(
    engine: sa.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ArrowCursor, *args: object) -> Any:
        self.fetchmany(10)
        raise RuntimeError("pip install the-driver[pandas]")

    for name in ("fetch_arrow_batches", "fetchmany_arrow", "to_arrow_iterable"):
        monkeypatch.setattr(ArrowCursor, name, refuse)
    assert stage_select(SELECT, {}, "sqlite://", str(tmp_path)) == ROWS
    assert pq.read_table(tmp_path / "part-00000.parquet")["id"].to_pylist() == list(range(ROWS))
