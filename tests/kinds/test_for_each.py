"""One spec per value of a column: every row is in one spec, and the names are legal and different."""

from __future__ import annotations

import logging
import sqlite3
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.sql import stage_select
from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs import FunctionJobSpec, JobSpec, PredictJobSpec, for_each, ids, parse_spec
from shoal.jobs.submission import fingerprint

ROWS = 240
CARRIERS = ["UA", "AA", "B6", "9E"]


def table() -> pa.Table:
    return pa.table(
        {
            "id": range(ROWS),
            "x": [i / 7 for i in range(ROWS)],
            "month": [i % 12 + 1 for i in range(ROWS)],
            "carrier": [CARRIERS[i % 7 % 4] for i in range(ROWS)],
            "day": pa.array([date(2026, 1, i % 3 + 1) for i in range(ROWS)]),
            "late": [i % 5 == 0 for i in range(ROWS)],
            "y": [float(i % 11) for i in range(ROWS)],
        }
    )


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    pq.write_table(table(), tmp_path / "flights.parquet", row_group_size=50)
    return tmp_path / "flights.parquet"


def fields(source: Any, **other: Any) -> dict[str, Any]:
    """The fields of a spec as a person writes them; `source` is the training dataset, or its path."""
    dataset = {"paths": [str(source)]} if isinstance(source, Path) else source
    register = {"model": "delays", "metric": "rmse", "holdout": dataset}
    return {"dataset": dataset, "input_cols": ["x"], "label_col": "y", "register": register, **other}


def rows_of(document: dict[str, Any]) -> list[int]:
    return DataConnector.from_spec(document["dataset"]).to_arrow()["id"].to_pylist()


def models(specs: list[dict[str, Any]]) -> list[str]:
    return [spec["register"]["model"] for spec in specs]


@pytest.mark.parametrize("column", ["carrier", "month", "day", "late"])
@pytest.mark.parametrize(
    "filters",
    [None, [["month", ">=", 3]], [[["month", "<", 4], ["x", ">", 5]], [["late", "=", True]]]],
    ids=["all", "and", "or"],
)
def test_the_specs_have_every_row_of_the_table_once(flights: Path, column: str, filters: Any):
    dataset = {"paths": [str(flights)], "filters": filters}
    whole = DataConnector.from_spec(dataset).to_arrow()["id"].to_pylist()

    specs = for_each(fields(dataset, eval_set={"eval": dataset}), column=column)

    parts = [rows_of(spec) for spec in specs]
    assert sorted(row for part in parts for row in part) == whole
    assert all(parts)
    for spec in specs:
        assert spec["dataset"] == spec["eval_set"]["eval"] == spec["register"]["holdout"]
        assert parse_spec(spec).document() == spec
    assert len({fingerprint(parse_spec(spec)) for spec in specs}) == len(specs)


@pytest.mark.parametrize("layout", ["partitions", "dictionary"])
def test_values_are_found_in_every_layout(tmp_path: Path, layout: str):
    if layout == "partitions":
        pq.write_to_dataset(table(), tmp_path / "flights", partition_cols=["carrier"])
    else:
        encoded = table().set_column(3, "carrier", table()["carrier"].dictionary_encode())
        pq.write_table(encoded, tmp_path / "flights")

    specs = for_each(fields(tmp_path / "flights"), column="carrier")

    assert models(specs) == ["delays-9E", "delays-AA", "delays-B6", "delays-UA"]
    assert sorted(row for spec in specs for row in rows_of(spec)) == list(range(ROWS))


def test_parts_of_a_split_stay_apart(flights: Path):
    train, holdout = DataConnector.from_parquet(flights).random_split([0.8, 0.2], seed=3)
    spec = JobSpec.parse(fields(train.to_spec()) | {"register": fields(holdout.to_spec())["register"]})

    specs = for_each(spec, column="carrier")

    learned = [row for one in specs for row in rows_of(one)]
    judged = [row for one in specs for row in rows_of({"dataset": one["register"]["holdout"]})]
    assert sorted(learned + judged) == list(range(ROWS))


@pytest.fixture
def warehouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with sqlite3.connect(tmp_path / "warehouse.db") as database:
        table().to_pandas().assign(**{"carrier": table()["carrier"].to_pylist()}).rename(
            columns={"carrier": "group"}
        ).to_sql("flights", database, index=False)
    url = f"sqlite:///{tmp_path}/warehouse.db"
    monkeypatch.setenv("SHOAL_CONNECTION_WAREHOUSE", url)
    return url


def test_queries_are_restricted_in_the_database(warehouse: str, tmp_path: Path):
    """The column has the name of a keyword, the query a parameter, an order, a `;` and a comment at its end."""
    query = {
        "sql": "SELECT * FROM flights WHERE month >= :each_value ORDER BY id DESC; -- of the window".replace(";", "")
        + "\n;",
        "params": {"each_value": 3},
        "connection": "warehouse",
    }

    specs = for_each(fields(query), column="group")

    assert models(specs) == ["delays-9E", "delays-AA", "delays-B6", "delays-UA"]
    found = []
    for number, one in enumerate(specs):
        dataset = one["dataset"]
        assert dataset == one["register"]["holdout"]
        folder = tmp_path / f"staged-{number}"
        folder.mkdir()
        stage_select(dataset["sql"], dataset["params"], warehouse, str(folder))
        rows = pd.read_parquet(folder)
        assert set(rows["group"]) == {one["register"]["model"].removeprefix("delays-")}
        assert rows["id"].is_monotonic_decreasing
        found += rows["id"].tolist()
    assert sorted(found) == [i for i in range(ROWS) if i % 12 + 1 >= 3]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        (
            "SELECT id, carier FROM (SELECT id, 'UA' AS carier FROM flights)",
            'no column "carrier"; did you mean "carier"',
        ),
        ("SELECT * FROM missing", "the query failed: .*no such table"),
        ("SELECT *, NULL AS carrier FROM flights", "has no rows that have a value"),
    ],
)
def test_a_query_that_cannot_be_divided_is_refused(warehouse: str, sql: str, said: str):
    with pytest.raises(DataError, match=said):
        for_each(fields({"sql": sql, "connection": "warehouse"}), column="carrier")


def test_a_query_with_an_unknown_connection_is_refused():
    query = {"sql": "SELECT 1 AS carrier", "connection": "nowhere"}
    with pytest.raises(InvalidArgumentError, match="SHOAL_CONNECTION_NOWHERE"):
        for_each(fields(query), column="carrier")
    with pytest.raises(DataError, match="does not exist"):
        for_each(fields(query), column="carrier", connection_url={"nowhere": "sqlite:////no/such.db"}.get)


def test_names_have_the_value(flights: Path):
    spec = fields(
        flights,
        register={"model": "{carrier} delays", "metric": "rmse", "holdout": {"paths": [str(flights)]}},
        tracking={"experiment": "delays of {carrier}", "run_name": "{carrier} {{ds}}", "tags": {"of": "a {carrier}"}},
        run_config={"job_id": "nightly-{carrier}-v1", "pool_name": "retrain", "priority": 3},
    )

    [one] = for_each(spec, column="carrier", values=["B6"])

    assert one["register"]["model"] == "B6 delays"
    assert one["tracking"]["experiment"] == "delays of B6"
    assert one["tracking"]["run_name"] == "B6 {{ds}}"
    assert one["tracking"]["tags"] == {"of": "a B6"}
    assert (one["run_config"]["job_id"], one["run_config"]["priority"]) == ("nightly-B6-v1", 3)


def test_names_without_a_placeholder_end_in_the_value(flights: Path):
    spec = JobSpec.parse(fields(flights, run_config={"job_id": "nightly"}))

    specs = for_each(spec, "month", [1, 12])

    assert models(specs) == ["delays-1", "delays-12"]
    assert [one["run_config"]["job_id"] for one in specs] == ["nightly-1", "nightly-12"]
    assert [one["tracking"]["run_name"] for one in specs] == [None, None]


@pytest.mark.parametrize(
    ("value", "model", "job"),
    [
        ("New York/JFK: T4 ", "delays-New_York_JFK_T4", "j-New_York_JFK_T4"),
        ("Zürich", "delays-Zürich", "j-Z_rich"),
        ("a?b#c@d", "delays-a_b_c_d", "j-a_b_c_d"),
        ("'; DROP TABLE", "delays-_DROP_TABLE", "j-_DROP_TABLE"),
        ("", "delays-_", "j-_"),
        ("../..", "delays-.._..", "j-.._.."),
    ],
)
def test_every_text_becomes_a_legal_name(flights: Path, value: str, model: str, job: str):
    [one] = for_each(fields(flights, run_config={"job_id": "j"}), "carrier", [value])

    assert one["register"]["model"] == model
    assert one["run_config"]["job_id"] == job == ids.checked(job)
    assert one["dataset"]["filters"] == [[["carrier", "=", value]]]


def test_a_function_has_its_datasets_restricted(flights: Path):
    dataset = {"paths": [str(flights)]}
    spec = FunctionJobSpec.parse(
        {
            "train_func": "package.module:train",
            "dataset_map": {"train": dataset, "airports": dataset},
            "register": {"model": "net", "metric": "rmse", "holdout": dataset, "label_col": "y"},
        }
    )

    specs = for_each(spec, column="carrier")

    assert models(specs) == ["net-9E", "net-AA", "net-B6", "net-UA"]
    assert all(one["framework"] == "pytorch" for one in specs)
    assert specs[0]["dataset_map"]["train"]["filters"] == [[["carrier", "=", "9E"]]]
    assert specs[0]["dataset_map"]["train"] == specs[0]["dataset_map"]["airports"]
    with pytest.raises(InvalidArgumentError, match="no dataset to train on"):
        for_each({"train_func": "package.module:train", "framework": "pytorch"}, column="carrier")


def test_nulls_and_small_values_are_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    carriers = ["UA"] * 6 + [None] * 3 + ["AA"] * 4 + ["OO", "HA"]
    numbers = [1.0] * 7 + [float("nan")] * 2 + [0.0, -0.0] + [2.0] * 4
    y = [1.0] * len(carriers)
    pq.write_table(pa.table({"carrier": carriers, "n": numbers, "x": y, "y": y}), tmp_path / "few.parquet")

    with caplog.at_level(logging.WARNING, "shoal.jobs"):
        specs = for_each(fields(tmp_path / "few.parquet"), "carrier", min_rows=4)
        assert [
            one["dataset"]["filters"][0][0][2]
            for one in for_each(fields(tmp_path / "few.parquet") | {"register": None}, "n")
        ] == [0.0, 1.0, 2.0]

    assert models(specs) == ["delays-AA", "delays-UA"]
    assert caplog.messages == [
        'column "carrier" has no value in 3 of 15 rows: no spec contains these rows',
        "column \"carrier\" has fewer than 4 rows with 'HA', 'OO': there is no spec for them",
        'column "n" has no value in 2 of 15 rows: no spec contains these rows',
    ]
    with pytest.raises(
        DataError, match=r'no value of column "carrier" has 7 rows in .*; the most frequent value has 6: lower min_rows'
    ):
        for_each(fields(tmp_path / "few.parquet"), "carrier", min_rows=7)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"column": "carier"}, DataError, 'has no column "carier"; did you mean "carrier"'),
        ({"column": "y"}, InvalidArgumentError, 'column "y" is the label'),
        ({"column": "id", "values": []}, InvalidArgumentError, "values is empty"),
        ({"column": "carrier", "values": "UA"}, InvalidArgumentError, "must be a list"),
        ({"column": "carrier", "values": ["UA", None]}, InvalidArgumentError, "the value None is not supported"),
        ({"column": "carrier", "values": [b"UA"]}, InvalidArgumentError, "is not supported"),
        ({"column": "month", "values": [0, 1, 0]}, InvalidArgumentError, "0 twice"),
        ({"column": "month", "values": ["1"]}, DataError, '"month"'),
        ({"column": "month", "values": [Decimal("1.5")]}, InvalidArgumentError, "is not supported"),
        ({"column": "carrier", "values": ["a b", "a/b"]}, InvalidArgumentError, "'a b' and 'a/b' .* both become"),
        ({"column": "carrier", "values": ["UA"], "min_rows": 2}, InvalidArgumentError, "min_rows=2 applies only"),
        ({"column": "carrier", "values": ["x" * 300]}, InvalidArgumentError, "not a legal name"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(flights: Path, arguments: dict[str, Any], error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        for_each(fields(flights), **arguments)


def test_a_spec_that_cannot_be_divided_is_refused(flights: Path, fresh_home: Path):
    with pytest.raises(InvalidArgumentError, match="is the spec of a batch prediction"):
        for_each(
            PredictJobSpec(model="models:/m/1", dataset=DataConnector.from_parquet(flights), output_path="/o"), "id"
        )
    with pytest.raises(InvalidArgumentError, match="is a staged copy"):
        for_each(fields(DataConnector.from_dataframe(table()).to_spec()), "carrier")
    with pytest.raises(DataError, match='has no rows with month > 99 that have a value in column "carrier"'):
        for_each(fields({"paths": [str(flights)], "filters": [["month", ">", 99]]}), "carrier")
    other = {"model": "delays-{carier}", "metric": "rmse", "holdout": {"paths": [str(flights)]}}
    with pytest.raises(InvalidArgumentError, match=r"placeholder \{carier\}: the only placeholder is \{carrier\}"):
        for_each(fields(flights, register=other), "carrier")
    with pytest.raises(InvalidArgumentError, match="unknown option"):
        for_each({**fields(flights), "inputs": []}, "carrier")


def test_a_column_of_ids_is_refused_unless_its_values_are_given(tmp_path: Path):
    pq.write_table(pa.table({"id": range(1001), "x": [1.0] * 1001, "y": [1.0] * 1001}), tmp_path / "ids")
    spec = fields(tmp_path / "ids") | {"register": None}

    with pytest.raises(InvalidArgumentError, match="has 1001 values, but at most 1000"):
        for_each(spec, "id")

    assert len(for_each(spec, "id", range(1001))) == 1001


def test_a_holdout_without_the_column_is_refused(flights: Path, tmp_path: Path):
    pq.write_table(table().drop_columns("carrier"), tmp_path / "holdout")
    register = {"model": "delays", "metric": "rmse", "holdout": {"paths": [str(tmp_path / "holdout")]}}
    with pytest.raises(DataError, match='holdout has no column "carrier"'):
        for_each(fields(flights, register=register), "carrier")
