"""SQL in a spec: what is refused when it is parsed, what a database refuses, and rows that are the same from each."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from socket import gethostname
from typing import Any

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.sql import count_values, narrowed_query, quoted_column, stage_select
from shoal.errors import DataError, InvalidArgumentError
from tests.support.postgres import PASSWORD, Postgres

WRITES = "WITH gone AS (DELETE FROM trips RETURNING *) SELECT * FROM gone"


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "warehouse.db") as database:
        database.execute("CREATE TABLE trips (id INTEGER, month INTEGER, delay REAL, carrier TEXT)")
        database.executemany("INSERT INTO trips VALUES (?, ?, ?, ?)", [(i, i % 12 + 1, i / 4, "AA") for i in range(60)])
    return f"sqlite:///{tmp_path}/warehouse.db"


def rows_in(url: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        count: int = connection.execute(sa.text("SELECT count(*) FROM trips")).scalar_one()
    engine.dispose()
    return count


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sql": "DELETE FROM trips"}, "sql must be a SELECT"),
        ({"sql": "/* SELECT */ -- SELECT\nDROP TABLE trips"}, "sql must be a SELECT"),
        ({"sql": "selection"}, "sql must be a SELECT"),
        ({"sql": "SELECT 1; DROP TABLE trips"}, 'contains a ";" before its end'),
        ({"sql": "SELECT 1 -- ;\n; COMMIT; DROP TABLE trips;"}, 'contains a ";" before its end'),
        ({"sql": "SELECT 1 /*! INTO OUTFILE '/x' */"}, 'contains "/*!"'),
        ({"sql": "/*!50000 DELETE FROM trips */"}, 'contains "/*!"'),
        ({"sql": "SELECT 1 /*M!100100 INTO OUTFILE '/x' */"}, 'contains "/*M!"'),
        ({"sql": "SELECT * FROM trips WHERE month > :low"}, "the parameter :low, but params has no value for it"),
        ({"sql": "SELECT 1", "params": {"low": 3}}, 'params has "low"'),
        ({"sql": "SELECT 1", "params": {"low": [3]}}, "params.low"),
        ({"sql": "SELECT 1", "connection": "postgresql://me:hunter2@host/x"}, "must be a name"),
        ({"sql": "SELECT 1", "connection": None}, "sql requires the option connection"),
        ({"sql": "SELECT 1", "paths": ("/x",)}, "give only one of these options"),
        ({"sql": "SELECT 1", "filters": [["x", "=", 1]]}, "write the conditions into the WHERE clause of sql"),
        ({"sql": None, "paths": ("/x",)}, "params and partition_by can be given only with the option sql"),
        ({"sql": None, "connection": None}, "set the option paths, or the options sql and connection"),
    ],
)
def test_a_wrong_query_is_refused_when_parsed(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        DatasetSpec.parse({"connection": "warehouse", **fields})
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("sql", ["select 1", "\n-- why\nSELECT 1 ;\n", "/* a */ with x as (select 1) select * from x"])
def test_one_select_is_accepted(sql: str) -> None:
    spec = DatasetSpec(sql=sql, connection="warehouse")
    assert DatasetSpec.parse(spec.model_dump(mode="json")) == spec
    with pytest.raises(InvalidArgumentError, match="sql of a dataset spec can be read only by a job"):
        DataConnector.from_spec(spec)


@pytest.mark.parametrize("name", ["trips", "main.trips;", '"trips"'])
def test_the_name_of_a_table_is_no_query(sqlite: str, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is only a name: .* write SELECT \* FROM"):
        DataConnector.from_sql(name, sqlite)


@pytest.mark.parametrize(("end", "warned"), [("", True), ("\nORDER\n BY id", False)])
def test_a_query_without_order_is_named_in_the_log(sqlite: str, caplog: Any, end: str, warned: bool) -> None:
    DataConnector.from_sql(f"SELECT * FROM trips{end}", sqlite)
    assert ("has no ORDER BY" in caplog.text) is warned


def test_parameters_are_bound(sqlite: str, tmp_path: Path) -> None:
    sql = "SELECT id FROM trips WHERE carrier = :carrier AND month <= :month ORDER BY id"
    injected = {"carrier": "x' OR 1=1; DROP TABLE trips; --", "month": 12}
    assert stage_select(sql, injected, sqlite, str(tmp_path)) == 0
    assert stage_select(sql, {"carrier": "AA", "month": 3}, sqlite, str(tmp_path)) == 15
    assert rows_in(sqlite) == 60


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT missing FROM trips", "no such column: missing"),
        ("SELECT * FROM dropped", "no such table: dropped"),
        ("WITH all_rows AS (SELECT 1) DELETE FROM trips", "attempt to write a readonly database"),
    ],
)
def test_sqlite_refuses_writes_and_wrong_names(sqlite: str, tmp_path: Path, sql: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        stage_select(sql, {}, sqlite, str(tmp_path))
    assert rows_in(sqlite) == 60


@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
def test_mysql_runs_the_query_in_a_read_only_transaction(
    sqlite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    engine = sa.create_engine(sqlite)
    engine.dialect.name = dialect
    events: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute", retval=True)
    def _(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> tuple[str, Any]:
        events.append(statement)
        return ("SELECT 1" if statement.startswith("SET") else statement), parameters

    sa.event.listen(engine, "rollback", lambda connection: events.append("rollback"))
    monkeypatch.setattr("shoal.data.sql._engine", lambda url, **options: engine)

    assert stage_select("SELECT id FROM trips", {}, sqlite, str(tmp_path)) == 60

    assert events[:3] == ["SET SESSION TRANSACTION READ ONLY", "rollback", "SELECT id FROM trips"]


def test_an_sqlite_database_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"typo\.db does not exist"):
        stage_select("SELECT 1", {}, f"sqlite:///{tmp_path}/typo.db", str(tmp_path))
    assert not (tmp_path / "typo.db").exists()


@pytest.mark.parametrize(
    "url",
    ["postgresql+psycopg://db/w?sslmode=require&sslrootcert=/no/ca.pem", "mysql+pymysql://db/w?ssl_ca=/no/ca.pem"],
)
def test_a_certificate_has_to_be_where_the_query_runs(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"names /no/ca.pem, which {gethostname()} does not have.*head of its pool"):
        stage_select("SELECT 1", {}, url, str(tmp_path))


def test_postgresql_refuses_writes_and_shows_no_password(postgres: Postgres, tmp_path: Path) -> None:
    postgres.run("CREATE DATABASE warehouse")
    try:
        postgres.run("CREATE TABLE trips AS SELECT i AS id, DATE '2024-01-01' + i AS day FROM generate_series(0, 59) i",
                     "warehouse")  # fmt: skip
        postgres.run("CREATE SEQUENCE ids", "warehouse")
        url = postgres.url("warehouse")
        for sql, said in (
            (WRITES, "in a read-only transaction"),
            ("SELECT nothing FROM trips", 'column "nothing" does not exist'),
            ("SELECT * FROM dropped", 'relation "dropped" does not exist'),
            ("SELECT nextval('ids')", r"cannot execute nextval\(\) in a read-only transaction"),
        ):
            with pytest.raises(DataError, match=said):
                stage_select(sql, {}, url, str(tmp_path))
        assert rows_in(url) == 60
        window = "SELECT id FROM trips WHERE day >= :low AND day < :high ORDER BY id"
        assert stage_select(window, {"low": "2024-01-11", "high": "2024-02-01"}, url, str(tmp_path)) == 21
        assert pq.read_table(tmp_path)["id"].to_pylist() == list(range(10, 31))
        table = 'SELECT id, day, id % 2 AS "Odd:ly" FROM trips WHERE id < :end ORDER BY id DESC -- newest first'
        for column, value, ids in (("Odd:ly", 1, [*range(49, 0, -2)]), ("day", "2024-01-11", [10])):
            quoted = quoted_column(table, {"end": 50}, url, column)
            assert sum(count_values(table, {"end": 50}, url, quoted).values()) == 50
            of_value, params = narrowed_query(table, {"end": 50}, quoted, value)
            assert stage_select(of_value, params, url, str(tmp_path)) == len(ids)
            assert pq.read_table(tmp_path)["id"].to_pylist() == ids
        with pytest.raises(DataError, match='the query has no column "od"'):
            quoted_column(table, {"end": 50}, url, "od")
        with pytest.raises(DataError, match="cannot be reached") as caught:
            stage_select("SELECT 1", {}, postgres.url("warehouse", password="mistaken"), str(tmp_path))
        assert "mistaken" not in str(caught.value) and PASSWORD not in str(caught.value)
    finally:
        postgres.run("DROP DATABASE warehouse WITH (FORCE)")
