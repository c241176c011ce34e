"""Checks before training: each bad input refused, with the file, the column and the way out."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.checks import (
    check_categories,
    check_finite,
    check_no_nulls,
    check_same_schema,
    validate_columns,
)
from shoal.data.planning import RowRange
from shoal.errors import DataError, InvalidArgumentError

from .conftest import Write


def test_good_columns_pass(write: Write) -> None:
    path = write(
        "m=1/a.parquet",
        i=pa.array([1, None], pa.int8()),
        u=pa.array([1, 2], pa.uint64()),
        f=pa.array([0.5, None], pa.float16()),
        b=[True, None],
        y=[0, 1],
        w=[1.0, 2.0],
    )
    connector = DataConnector.from_parquet(path)
    validate_columns(connector.source, ["i", "u", "f", "b", "m"], "y", ["w"])
    check_no_nulls(connector.source, "y")


def test_missing_column_suggests_near_names(write: Write) -> None:
    path = write("a.parquet", dep_delay=[1], arr_delay=[2], Month=[1])
    connector = DataConnector.from_parquet(path)
    with pytest.raises(DataError, match=rf'{path} has no column "dep_dely"; did you mean "dep_delay"'):
        validate_columns(connector.source, ["dep_dely"])
    with pytest.raises(DataError, match='did you mean "Month"'):
        validate_columns(connector.source, ["month"])
    with pytest.raises(DataError, match="its columns are dep_delay, arr_delay, Month"):
        validate_columns(connector.source, ["zzzz"])


_CODES = "a number for each of its values"
BAD_TYPES = {
    "string": (["a"], _CODES),
    "large_string": (pa.array(["a"], pa.large_string()), _CODES),
    "dictionary": (pa.array(["a"]).dictionary_encode(), _CODES),
    "date": ([datetime.date(2026, 1, 1)], "day of the year"),
    "timestamp": ([datetime.datetime(2026, 1, 1)], "day of the year"),
    "list": ([[1, 2]], "separate column"),
    "struct": ([{"a": 1}], "separate column"),
    "binary": ([b"a"], "leave it out"),
}


@pytest.mark.parametrize("kind", BAD_TYPES)
def test_types_that_cannot_be_trained_on(write: Write, kind: str) -> None:
    values, advice = BAD_TYPES[kind]
    connector = DataConnector.from_parquet(write("a.parquet", x=values, y=[1]))
    with pytest.raises(
        DataError, match=rf'a\.parquet: column "x" is of type .*{kind}.* cannot be trained on.*{advice}'
    ):
        validate_columns(connector.source, ["x"], "y")
    if advice is _CODES:
        with pytest.raises(DataError, match="add it to categorical_cols"):
            validate_columns(connector.source, ["x"], "y", takes_categories=True)
    with pytest.raises(DataError, match='label "x" is of type'):
        validate_columns(connector.source, ["y"], "x")


GOOD_CATEGORIES = {
    "string": ["a", None],
    "large_string": pa.array(["a", None], pa.large_string()),
    "string_view": pa.array(["a", None], pa.string_view()),
    "dictionary": pa.array(["a", None]).dictionary_encode(),
    "integers in a dictionary": pa.array([7, None]).dictionary_encode(),
    "integer": pa.array([7, None], pa.uint16()),
    "boolean": [True, None],
}


@pytest.mark.parametrize("kind", GOOD_CATEGORIES)
def test_types_of_categories(write: Write, kind: str) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=GOOD_CATEGORIES[kind], y=[1, 2]))
    validate_columns(connector.source, ["x"], "y", categorical_cols=["x"])


BAD_CATEGORIES = {
    "double": ([1.0], "remove the column from categorical_cols"),
    "date": ([datetime.date(2026, 1, 1)], "the month or the weekday"),
    "decimal": ([decimal.Decimal("1.5")], "remove the column from categorical_cols"),
    "list": ([[1, 2]], "separate column"),
    "binary": ([b"a"], "as text"),
}


@pytest.mark.parametrize("kind", BAD_CATEGORIES)
def test_types_that_cannot_be_categories(write: Write, kind: str) -> None:
    values, advice = BAD_CATEGORIES[kind]
    connector = DataConnector.from_parquet(write("a.parquet", x=values, y=[1]))
    with pytest.raises(
        DataError, match=rf'a\.parquet: column "x" is of type .*{kind}.* cannot be categorical: .*{advice}'
    ):
        validate_columns(connector.source, ["x"], "y", categorical_cols=["x"])


def test_categories_may_be_stored_differently_from_file_to_file(write: Write, tmp_path: Path) -> None:
    write("d/a.parquet", x=pa.array(["a"]).dictionary_encode(), n=pa.array([1], pa.int8()))
    write("d/b.parquet", x=pa.array(["a"]), n=pa.array([1], pa.int64()))
    connector = DataConnector.from_parquet(tmp_path / "d")
    validate_columns(connector.source, ["x", "n"], categorical_cols=["x", "n"])
    validate_columns(connector.source, ["x", "n"], categorical_cols=["x"])
    write("d/b.parquet", x=[1], n=[1])
    with pytest.raises(DataError, match=r'd/b\.parquet: column "x" is of type int64'):
        validate_columns(DataConnector.from_parquet(tmp_path / "d").source, ["x", "n"], categorical_cols=["x", "n"])


def test_other_rows_have_categories_of_the_same_kind(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=["1"], n=pa.array([1], pa.int8()), e=pa.nulls(1)))
    check_categories(connector.source, {"x": pa.large_string(), "n": pa.int64(), "e": pa.string()})
    with pytest.raises(DataError, match=r'a\.parquet: column "x" is of type string, but its categories are of .*int64'):
        check_categories(connector.source, {"x": pa.int64()})


def test_columns_without_a_value(write: Write) -> None:
    path = write("a.parquet", x=pa.array([None, None], pa.float64()), n=pa.nulls(2), y=[1, 2])
    connector = DataConnector.from_parquet(path)
    for name in ("x", "n"):
        with pytest.raises(DataError, match=f'column "{name}" is null in every row'):
            validate_columns(connector.source, [name], "y")
    validate_columns(connector.source, ["x", "n"], allow_all_null=True)


def test_files_with_differing_schemas(write: Write, tmp_path: Path) -> None:
    write("d/a.parquet", x=[1], y=[1])
    write("d/b.parquet", x=[1])
    connector = DataConnector.from_parquet(tmp_path / "d")
    with pytest.raises(DataError, match=r'd/b\.parquet has no column "y"'):
        validate_columns(connector.source, ["x"], "y")
    with pytest.raises(DataError, match=r'd/b\.parquet has no column "y"'):
        connector.to_arrow()
    validate_columns(connector.source, ["x"])  # what is not used may differ
    write("d/b.parquet", x=[True], y=[1])
    connector = DataConnector.from_parquet(tmp_path / "d")
    with pytest.raises(
        DataError, match=r'd/b\.parquet: column "x" is of type bool, but of type int64 in .*d/a\.parquet'
    ):
        validate_columns(connector.source, ["x"], "y")
    with pytest.raises(DataError, match=r"d/b\.parquet"):
        check_same_schema(connector.source, ["x"])


def test_partition_column_in_some_paths_only(write: Write, tmp_path: Path) -> None:
    write("d/m=1/a.parquet", x=[1])
    write("d/z.parquet", x=[1])
    with pytest.raises(DataError, match=r'd/z\.parquet has no column "m"'):
        validate_columns(DataConnector.from_parquet(tmp_path / "d").source, ["x", "m"])
    write("d/z/m=2/b.parquet", x=[1], m=[2])
    (tmp_path / "d/z.parquet").unlink()
    with pytest.raises(DataError, match="stores the column"):
        validate_columns(DataConnector.from_parquet(tmp_path / "d").source, ["x", "m"])


def test_empty_files(write: Write, tmp_path: Path) -> None:
    empty = write("d/a.parquet", x=pa.array([], pa.int64()))
    with pytest.raises(DataError, match=f"the dataset has no rows: {empty}"):
        validate_columns(DataConnector.from_parquet(empty).source, ["x"])
    # An empty frame's types are guesses: among files with rows they do not count.
    write("d/a.parquet", other=pa.array([], pa.string()))
    write("d/b.parquet", x=[1])
    validate_columns(DataConnector.from_parquet(tmp_path / "d").source, ["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], "y"), "input_cols is empty"),
        ((["x", "x"], "y"), "more than once in input_cols"),
        ((["x", "y"], "y"), "also in input_cols"),
    ],
)
def test_contradictory_arguments(write: Write, arguments: tuple[object, ...], message: str) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1], y=[1]))
    with pytest.raises(InvalidArgumentError, match=message):
        validate_columns(connector.source, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("named", "message"), [(["z"], '"z", which is not among'), (["y"], '"y"')])
def test_categorical_columns_are_input_columns(write: Write, named: list[str], message: str) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", x=[1], y=[1]))
    with pytest.raises(InvalidArgumentError, match=message):
        validate_columns(connector.source, ["x"], "y", categorical_cols=named)


def test_null_label_is_found_in_the_footer(write: Write) -> None:
    path = write("a.parquet", 2, x=[1, 2, 3, 4], y=[1, 2, None, 4])
    connector = DataConnector.from_parquet(path)
    with pytest.raises(DataError, match=rf'{path}, row group 1: the label "y" is null in 1 of 2 rows'):
        check_no_nulls(connector.source, "y")
    check_no_nulls(connector.source, "x")


def test_null_label_without_statistics_is_found_at_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": [1.0, None]}), path, write_statistics=False)
    connector = DataConnector.from_parquet(path)
    validate_columns(connector.source, ["y"])
    check_no_nulls(connector.source, "y")
    with pytest.raises(
        DataError, match=r'a\.parquet, row group 3: the label "y" is null.* 1 of 2 rows, first at row 11'
    ):
        check_finite(np.array([1.0, np.nan]), "label", "y", RowRange(str(path), 3, 10, 12), "leave it out")
    check_finite(np.array([1.0, 2.0]), "label", "y", RowRange(str(path), 0, 0, 2), "leave it out")


def test_null_partition_label(write: Write) -> None:
    path = write("y=__HIVE_DEFAULT_PARTITION__/a.parquet", x=[1])
    with pytest.raises(DataError, match="is null in 1 of 1"):
        check_no_nulls(DataConnector.from_parquet(path).source, "y")
