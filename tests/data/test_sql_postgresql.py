"""PostgreSQL by ADBC: rows and types, parameters, ranges of keys on several connections, and a server that dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector, postgresql, sql
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.parquet import files
from shoal.data.parquet.rows_digest import STORED
from shoal.data.row_writer import write_tables
from shoal.data.sql import stage_select
from shoal.errors import DataAccessError, DataError, InvalidArgumentError, MissingExtraError
from tests.support.postgres import PASSWORD, Postgres
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes

ROWS = 30_000

TABLE = f"""CREATE TABLE trips AS SELECT i AS id, i::bigint * 10000000000 AS far, i / 3.0::float8 AS ratio,
    (i / 4.0)::real AS quarter, i % 2 = 0 AS even, 'caf\u00e9 ' || i % 7 AS carrier, DATE '2024-01-01' + i % 90 AS day,
    TIMESTAMP '2024-01-01 00:00:00.5' + i * INTERVAL '1 minute' AS at, NULLIF(i % 9, 4) AS gate,
    TIMESTAMPTZ '2024-01-01 00:00:00+02' + i * INTERVAL '1 minute' AS zoned, (i / 100.0)::numeric(10, 2) AS price,
    CASE WHEN i % 5 > 0 THEN i * -0.0125 END AS share, decode(lpad(to_hex(i), 8, '0'), 'hex') AS raw,
    NULL::int AS nothing FROM generate_series(1, {ROWS}) i"""

ALL = "SELECT * FROM trips ORDER BY id"


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[str]:
    postgres.run("CREATE DATABASE columns TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    postgres.run(TABLE, "columns")
    yield postgres.url("columns")
    postgres.run("DROP DATABASE columns WITH (FORCE)")


@pytest.fixture
def staged(url: str, tmp_path: Path) -> Callable[..., pq.ParquetFile]:
    def stage(query: str, *, place: str = "", **options: Any) -> pq.ParquetFile:
        (folder := tmp_path / (place or "rows")).mkdir(exist_ok=True)
        stage_select(query, options.pop("params", {}), options.pop("url", url), str(folder), **options)
        [file] = folder.iterdir()
        return pq.ParquetFile(file)

    return stage


@pytest.fixture
def without_adbc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "find_spec", lambda name: None)
    monkeypatch.setattr(files, "find_spec", lambda name: None)


def digest(file: pq.ParquetFile) -> bytes:
    found: bytes = file.metadata.metadata[STORED]
    return found


def test_columns_have_the_types_of_the_server(staged: Any) -> None:
    file = staged(ALL)
    assert [str(type_) for type_ in file.schema_arrow.types] == [
        "int32", "int64", "double", "float", "bool", "string", "date32[day]", "timestamp[us]", "int32",
        "timestamp[us, tz=UTC]", "decimal128(10, 2)", "decimal128(22, 4)", "binary", "int32",
    ]  # fmt: skip
    assert file.metadata.num_rows == ROWS
    assert staged(f"SELECT * FROM ({ALL}) q WHERE id < 0 ORDER BY id", place="none").schema_arrow.names[0] == "id"


def test_rows_are_those_of_sqlalchemy(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # SQLAlchemy gives a column without values no type.
    names = [name for name in staged(ALL).schema_arrow.names if name != "nothing"]
    query = f"SELECT {', '.join(names)} FROM trips ORDER BY id"
    file = staged(query)
    monkeypatch.setattr(postgresql, "find_spec", lambda name: None)
    other = staged(query, place="other")
    assert digest(file) == digest(other)
    for name in names:
        assert file.read()[name].cast(other.schema_arrow.field(name).type) == other.read()[name], name


@pytest.mark.parametrize(
    ("expression", "type_"),
    [("ARRAY[[1, 2], [3, 4]]", "list<element: list<element: int64>>"), ("'{\"a\": 1}'::json", "struct<a: int64>"),
     ("5::money", "string"), ("B'101'", "string")],
)  # fmt: skip
def test_types_that_adbc_does_not_read_come_as_before(staged: Any, expression: str, type_: str) -> None:
    assert str(staged(f"SELECT {expression} AS a").schema_arrow.field("a").type) == type_


@pytest.mark.parametrize(
    ("expression", "said"),
    [("'infinity'::timestamp", "such as infinity"), ("'-infinity'::date", "such as infinity"),
     ("'NaN'::numeric", "CAST the column"), ("1 / (i - 1)", "division by zero"), ("missing", 'column "missing" does'),
     ("1 AS a, 2", 'several columns named "a"')],
)  # fmt: skip
def test_values_and_queries_that_are_refused(staged: Any, expression: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        staged(f"SELECT {expression} AS a FROM generate_series(1, 3) i ORDER BY 1")


def test_no_value_of_a_parameter_becomes_sql(staged: Any) -> None:
    text = "a'\\:b\\'; --\n$1 %(x)s \u00e9"
    params = {"text": text, "number": -5, "far": 2**40, "huge": 2**70, "real": 1e-05, "yes": True, "none": None}
    query = """SELECT :text AS a, 5 -:number AS b, :real AS c, :yes AS d, '100%' AS e, '\\:text' AS f, :far % 7 AS g
        FROM trips WHERE day = :day AND :none IS NULL AND far < :huge AND day + :number < :day ORDER BY id -- % :text"""
    rows = staged(query, params={**params, "day": "2024-02-01"}).read().to_pylist()
    assert len(rows) > 300
    assert rows[0] == {"a": text, "b": 10, "c": 1e-05, "d": True, "e": "100%", "f": ":text", "g": 2**40 % 7}
    for quoted, value in (("':x'", "|| version() ||"), ("':x'", 5), ("E':x'", "|| version() ||")):
        with pytest.raises(DataError, match="syntax error"):
            staged(f"SELECT {quoted} AS a", params={"x": value})


@pytest.mark.parametrize(
    "query",
    ["SELECT 1 AS a) TO PROGRAM 'touch /tmp/written' -- :text", "SELECT nextval('missing') AS a WHERE 'x' <> :text",
     "SELECT CAST(:text AS date) AS a"],
)  # fmt: skip
def test_errors_show_no_query_and_nothing_is_written(staged: Any, query: str) -> None:
    with pytest.raises(DataError, match="ERROR: ") as caught:
        staged(query, params={"text": "2024-31-01"} if "date" in query else {"text": "hidden"})
    assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert not Path("/tmp/written").exists()


def test_options_of_the_url_reach_libpq(staged: Any, url: str, postgres: Postgres) -> None:
    query = "SELECT current_setting('application_name') AS a, current_setting('search_path') AS b ORDER BY 1"
    found = staged(query, url=f"{url}?application_name=it%27s%20%5C&options=-csearch_path%3Dpg_catalog").read()
    assert found.to_pylist() == [{"a": "it's \\", "b": "pg_catalog"}]
    with pytest.raises(DataAccessError, match=r"cannot be reached.*SSL") as caught:
        staged(query, url=f"{url}?sslmode=require")
    assert PASSWORD not in str(caught.value)
    plain = url.replace("+psycopg", "+pg8000")
    assert staged("SELECT 1 AS a ORDER BY 1", url=plain, place="other").metadata.num_rows == 1


def test_only_used_columns_are_read(staged: Any) -> None:
    assert staged(ALL, columns=["share", "id"]).schema_arrow.names == ["id", "share"]
    # The error about a missing column names all columns.
    assert len(staged(ALL, columns=["id", "shares"], place="whole").schema_arrow.names) == 14


@pytest.mark.parametrize("key", ["id", "day", "zoned", "carrier", "gate", "share"])
def test_rows_do_not_depend_on_the_number_of_connections(
    staged: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    query = f"SELECT id, price, {key} AS k FROM trips ORDER BY k, id"
    monkeypatch.setattr(postgresql, "RANGE_ROWS", 4_000)
    monkeypatch.setattr(postgresql.os, "cpu_count", lambda: 3)
    several = staged(query, partition_by="k")
    monkeypatch.setattr(postgresql, "MOST_CONNECTIONS", 1)
    one = staged(query, partition_by="k", place="one")
    assert several.read() == one.read() == staged(query, place="plain").read()
    assert several.metadata.num_row_groups == one.metadata.num_row_groups == 1
    assert digest(several) == digest(one)


def test_all_connections_read_the_same_snapshot(
    staged: Any, url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.run("CREATE TABLE vanishing AS SELECT * FROM generate_series(1, 9000) AS id", "columns")
    monkeypatch.setattr(postgresql, "RANGE_ROWS", 1_000)
    monkeypatch.setattr(postgresql.os, "cpu_count", lambda: 3)
    connect, connections = postgresql._connect, []

    def connect_and_delete(*args: Any) -> Any:
        connections.append(connect(*args))
        if len(connections) == 2:
            postgres.run("DELETE FROM vanishing WHERE id % 2 = 0", "columns")
        return connections[-1]

    monkeypatch.setattr(postgresql, "_connect", connect_and_delete)
    found = staged("SELECT id FROM vanishing ORDER BY id", partition_by="id").read()
    assert found["id"].to_pylist() == list(range(1, 9001))
    assert len(connections) == 3
    assert postgres.run("SELECT count(*) FROM vanishing", "columns") == [(4500,)]


def test_ranges_of_a_query_whose_rows_vary_are_refused(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "RANGE_ROWS", 1_000)
    query = f"SELECT id FROM trips CROSS JOIN (SELECT random() AS part) parts WHERE id > part * {ROWS}"
    with pytest.raises(DataError, match=r"other rows each time, as with random\(\), .* omit partition_by"):
        staged(query, partition_by="id")


def test_the_column_of_the_ranges_need_not_be_used(staged: Any) -> None:
    assert staged(ALL, columns=["price"], partition_by="id").read()["price"] == staged(ALL, place="all").read()["price"]


def test_a_wrong_partition_by_is_refused(staged: Any, url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='did you mean "id"'):
        staged(ALL, partition_by="Id")
    for query, connection in (("SELECT ARRAY[id] AS a, id FROM trips", url), ("SHOW server_version", url),
                              ("SELECT 1 AS id", "sqlite://")):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="only for a SELECT in text form from PostgreSQL"):
            DataConnector.from_sql(query, connection, partition_by="id", staging_location=tmp_path)
    with pytest.raises(InvalidArgumentError, match="only with the option sql"):
        DatasetSpec.parse({"paths": ["/x"], "partition_by": "id"})
    assert "partition_by" not in DatasetSpec(sql="SELECT 1", connection="w").model_dump(mode="json")
    assert not list(tmp_path.glob("*/*"))


def test_partition_by_needs_the_extra(staged: Any, without_adbc: None) -> None:
    with pytest.raises(MissingExtraError, match=r"shoal\[adbc\]"):
        staged(ALL, partition_by="id")


@pytest.mark.parametrize("partition_by", [None, "i"])
def test_nothing_is_kept_if_the_server_dies(
    url: str, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_by: str | None
) -> None:
    monkeypatch.setattr(postgresql, "RANGE_ROWS", 10_000)
    written = []

    def write(tables: Iterator[pa.Table], directory: str) -> int:
        def dying() -> Iterator[pa.Table]:
            for table in tables:
                if not written:
                    postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'columns'")
                written.append(table.num_rows)
                yield table

        return write_tables(dying(), directory)

    monkeypatch.setattr(sql, "write_tables", write)
    query = "SELECT i, repeat('x', 1000) AS t FROM generate_series(1, 200000) i ORDER BY i"
    with pytest.raises(DataAccessError, match="the query failed: "):
        DataConnector.from_sql(query, url, partition_by=partition_by, staging_location=tmp_path)
    assert 0 < sum(written) < 200_000
    assert list(tmp_path.iterdir()) == []


def test_a_signal_cancels_the_query(url: str, postgres: Postgres, tmp_path: Path) -> None:
    active = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'columns' AND state = 'active'"

    def interrupt() -> None:
        wait_until(lambda: postgres.run(active) == [(1,)], "the query", seconds=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        DataConnector.from_sql("SELECT pg_sleep(600), 1 AS a ORDER BY a", url, staging_location=tmp_path)
    thread.join()
    assert postgres.run(active) == [(0,)]
    assert list(tmp_path.iterdir()) == []
