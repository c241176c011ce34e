"""Filters: parsing, rows against pyarrow and pandas, row groups that are not read, plans, digests and errors."""

from __future__ import annotations

import datetime as dt
import json
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import DataConnector, ShardedDataConnector
from shoal.data.checks import check_no_nulls, validate_columns
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.filters import parse_filters
from shoal.data.parquet.rows_digest import rows_digest
from shoal.data.planning import ALONE, GangPosition, set_current_position
from shoal.errors import DataError, InvalidArgumentError
from tests.data.conftest import Write

# Parsing


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ([["month", ">=", 3]], [[["month", ">=", 3]]]),
        ([("month", "==", 3), ("x", "in", {2, 1})], [[["month", "=", 3], ["x", "in", [1, 2]]]]),
        ([[("a", "=", True)], [("b", "!=", 1.5)]], [[["a", "=", True]], [["b", "!=", 1.5]]]),
        ([["d", "<", dt.date(2024, 3, 1)]], [[["d", "<", "2024-03-01"]]]),
        ([["d", "<", pd.Timestamp("2024-03-01 12:00")]], [[["d", "<", "2024-03-01T12:00:00"]]]),
        ([["d", "in", np.array([1, 2])]], [[["d", "in", [1, 2]]]]),
    ],
)
def test_filters_are_stored_in_one_form(given: Any, parsed: Any) -> None:
    spec = DatasetSpec(paths=("/x",), filters=given)
    document = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert document["filters"] == parsed
    assert DatasetSpec.parse(document) == spec


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "filters is empty"),
        ("month > 3", "must be a list"),
        (["month", ">", 3], "single term"),
        ([["month", ">"]], "a term is [column, operator, value]"),
        ([["month", "~", 3]], "unknown operator '~'"),
        ([[]], "not a list of terms"),
        ([[["month", ">", 3]], []], "not a list of terms"),
        ([["month", "!=", None]], "leaves out the rows with null, as != -1 does"),
        ([["month", "in", [1, None]]], "no row matches such a comparison"),
        ([["month", "=", math.nan]], "must be finite"),
        ([["month", "in", 3]], "takes a list"),
        ([["month", "in", "3"]], "takes a list"),
        ([["month", "in", []]], "at least one value"),
        ([["month", "=", {"a": 1}]], "a value must be"),
        ([["x", "=", 1], [3, "=", 1]], "the name of the column must be a text"),
    ],
)
def test_wrong_filters_are_refused_when_parsed(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r".*") as caught:
        DataConnector.from_parquet("/x", filters=given)
    assert said in str(caught.value)
    with pytest.raises(InvalidArgumentError) as caught:
        DatasetSpec(paths=("/x",), filters=given)
    assert said in str(caught.value)


# Rows

_DAYS = [dt.date(2024, 1, day) for day in range(1, 8)]
_TIMES = [dt.datetime(2024, 1, day, hour) for day in (1, 2, 3) for hour in (0, 12)]
_KINDS: dict[str, tuple[pa.DataType, list[Any], Callable[[Any], Any]]] = {
    # column type, values of cells and of terms, conversion of a term's value for pyarrow
    "int8": (pa.int8(), [-128, -1, 0, 1, 2, 127], int),
    "int64": (pa.int64(), [-(2**62), -1, 0, 1, 2, 2**62], int),
    "uint32": (pa.uint32(), [0, 1, 2, 2**32 - 1], int),
    "float": (pa.float64(), [-1.5, -0.0, 0.0, 1.0, 2.5, math.nan, math.inf], float),
    "text": (pa.string(), ["", "a", "ab", "b", "é", "\U0001f600"], str),
    "codes": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "c"], str),
    "bool": (pa.bool_(), [False, True], bool),
    "date": (pa.date32(), _DAYS, lambda value: value),
    "time": (pa.timestamp("ms"), _TIMES, lambda value: value),
    "utc": (pa.timestamp("us", "UTC"), [time.replace(tzinfo=dt.UTC) for time in _TIMES], lambda value: value),
    "money": (pa.decimal128(10, 2), [Decimal("-1.00"), Decimal("0.00"), Decimal("1.50"), Decimal("2.25")], lambda v: v),
}


@st.composite
def _cases(draw: st.DrawFn) -> tuple[pa.Table, int, list[list[tuple[str, str, Any]]]]:
    rows = draw(st.integers(1, 40))
    names = draw(st.lists(st.sampled_from(sorted(_KINDS)), min_size=1, max_size=3, unique=True))
    columns = {
        name: pa.array(
            draw(st.lists(st.none() | st.sampled_from(_KINDS[name][1]), min_size=rows, max_size=rows)), _KINDS[name][0]
        )
        for name in names
    }
    if names[0] != "codes" and draw(st.booleans()):  # sorted data have tight statistics
        order = pa.table(columns).sort_by([(names[0], "ascending")])
        columns = {name: order[name] for name in names}

    def term() -> tuple[str, str, Any]:
        name = draw(st.sampled_from(names))
        # pyarrow has no order of booleans in a filter, and codes of a dictionary are compared as text here.
        ordered = [] if name == "bool" else ["<", "<=", ">", ">="]
        operator = draw(st.sampled_from(["=", "!=", "in", "not in", *ordered]))
        values = [v for v in _KINDS[name][1] if not (isinstance(v, float) and not math.isfinite(v))]
        if operator in ("in", "not in"):
            return name, operator, draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        return name, operator, draw(st.sampled_from(values))

    filters = [[term() for _ in range(draw(st.integers(1, 2)))] for _ in range(draw(st.integers(1, 2)))]
    return pa.table({"row": range(rows), **columns}), draw(st.integers(1, 12)), filters


def _expected(table: pa.Table, filters: list[list[tuple[str, str, Any]]]) -> list[int]:
    """Evaluate filters in plain Python, for one row at a time; a null matches nothing."""
    compare = {
        "=": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
        "in": lambda a, b: a in b,
        "not in": lambda a, b: a not in b,
    }
    return [
        row["row"]
        for row in table.to_pylist()
        if any(
            all(row[name] is not None and compare[operator](row[name], value) for name, operator, value in terms)
            for terms in filters
        )
    ]


def _plain(value: Any) -> Any:
    """Decimals are given as numbers; all other values as they are."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, Decimal) else value


@pytest.mark.parametrize("type_", [pa.date32(), pa.date64(), pa.timestamp("us")])
def test_the_first_and_the_last_day_can_be_compared(tmp_path: Path, type_: pa.DataType) -> None:
    path = tmp_path / "days.parquet"
    days = pa.array([dt.date.min, dt.date(2024, 1, 1), dt.date.max], pa.date32())
    pq.write_table(pa.table({"row": range(3), "day": days.cast(type_)}), path)
    for operator, day, expected in ((">", "9999-12-31", []), ("<", "0001-01-01", []), (">=", "9999-12-31", [2])):
        found = DataConnector.from_parquet(path, filters=[("day", operator, day)]).to_arrow()
        assert found["row"].to_pylist() == expected


@settings(max_examples=60, deadline=None)
@given(case=_cases(), statistics=st.booleans())
def test_rows_are_those_that_pyarrow_and_plain_python_select(
    tmp_path_factory: pytest.TempPathFactory, case: Any, statistics: bool
) -> None:
    table, group_rows, filters = case
    path = tmp_path_factory.getbasetemp() / "filters.parquet"
    pq.write_table(table, path, row_group_size=group_rows, write_statistics=statistics)
    given = [[(name, operator, _plain(value)) for name, operator, value in terms] for terms in filters]
    connector = DataConnector.from_parquet(path, filters=given)
    found = connector.to_arrow()
    expected = _expected(table, filters)
    assert found["row"].to_pylist() == expected
    assert connector.num_rows() == len(expected)
    assert [group.rows for group in connector.source.row_groups()] == [
        sum(start <= row < start + group_rows for row in expected) for start in range(0, table.num_rows, group_rows)
    ]
    # pyarrow keeps nulls for "not in", compares the bits of floats for "in", and does not order a dictionary.
    terms = [term for alternative in filters for term in alternative]
    if not any(
        operator == "not in" or (operator == "in" and name == "float") or name == "codes" for name, operator, _ in terms
    ):
        other = pd.read_parquet(path, filters=filters, columns=["row"])
        assert other["row"].tolist() == expected


def test_a_value_that_the_column_s_type_does_not_have(write: Write) -> None:
    path = write("a.parquet", small=pa.array([-1, 3, None], pa.int8()), price=pa.array([Decimal("1.25"), None, None]))
    rows = {
        ("small", "<", 1000): 2, ("small", ">", 1000): 0, ("small", "!=", 1000): 2, ("small", "=", 1000): 0,
        ("small", ">", 2.5): 1, ("small", "<=", -0.5): 1, ("small", "=", 2.5): 0, ("small", "!=", 2.5): 2,
        ("price", ">", 1.249): 1, ("price", "=", 1.25): 1, ("price", "<", 10**30): 1, ("price", "=", 1.251): 0,
    }  # fmt: skip
    assert {term: DataConnector.from_parquet(path, filters=[term]).num_rows() for term in rows} == rows


def test_dates_and_timestamps_as_iso_text(write: Write) -> None:
    noon = dt.datetime(2024, 3, 1, 12)
    path = write(
        "a.parquet",
        day=pa.array([noon.date()]), naive=pa.array([noon], pa.timestamp("ns")),
        zoned=pa.array([noon], pa.timestamp("ms", "America/New_York")), seconds=pa.array([noon], pa.timestamp("s")),
    )  # fmt: skip
    matching = [
        ("day", ">=", "2024-03-01"), ("naive", ">", "2024-03-01"), ("naive", "=", "2024-03-01T12:00:00.000000"),
        ("zoned", "=", "2024-03-01T12:00:00"), ("zoned", "=", "2024-03-01T13:00:00+01:00"), ("zoned", "<", noon.date()),
        ("seconds", "<", "2024-03-01T12:00:00.5"), ("seconds", ">=", "2024-03-01T12:00:00"),
    ]  # fmt: skip
    assert {term: DataConnector.from_parquet(path, filters=[term]).num_rows() for term in matching} == {
        term: int(term != ("zoned", "<", noon.date())) for term in matching
    }


# Row groups and partitions that are not read


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Row groups that are decoded, with the columns."""
    seen: list[tuple[int, tuple[str, ...]]] = []
    whole, batches = pq.ParquetFile.read_row_group, pq.ParquetFile.iter_batches

    def read_row_group(self: Any, i: int, columns: Any = None, **rest: Any) -> Any:
        seen.append((i, tuple(columns)))
        return whole(self, i, columns=columns, **rest)

    def iter_batches(self: Any, *args: Any, row_groups: Any, columns: Any, **rest: Any) -> Any:
        seen.extend((i, tuple(columns)) for i in row_groups)
        return batches(self, *args, row_groups=row_groups, columns=columns, **rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_row_group)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    return seen


def test_row_groups_that_cannot_match_are_never_decoded(write: Write, decoded: list[Any]) -> None:
    path = write("a.parquet", row_group_size=10, day=list(range(100)), x=[float(i) for i in range(100)])
    connector = DataConnector.from_parquet(path, filters=[("day", ">=", 35), ("day", "<", 60)])
    assert connector.num_rows() == 25
    assert decoded == [(3, ("day",))]  # the statistics decide for all other row groups
    decoded.clear()
    assert connector.to_pandas()["x"].tolist() == [float(i) for i in range(35, 60)]
    assert decoded == [(3, ("day", "x")), (4, ("day", "x")), (5, ("day", "x"))]
    decoded.clear()
    table = next(connector.iter_batches(["x"]))
    assert decoded == [(3, ("x", "day"))]
    assert table.column_names == ["x"]


def test_files_of_partitions_that_cannot_match_are_not_opened(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for month in (1, 2, 3):
        write(f"d/month={month}/a.parquet", x=[month, month * 10])
    write("d/month=__HIVE_DEFAULT_PARTITION__/a.parquet", x=[4])
    (tmp_path / "d/month=3/broken.parquet").write_bytes(b"not a Parquet file")
    connector = DataConnector.from_parquet(tmp_path / "d", filters=[("month", "<", 3), ("x", ">", 1)])
    assert connector.to_pandas().to_dict("list") == {"x": [10, 2, 20], "month": [1, 2, 2]}
    assert [footer.path.split("/")[-2] for footer in connector.source.footers()] == ["month=1", "month=2"]
    either = DataConnector.from_parquet(
        tmp_path / "d", filters=[[("month", "=", 1)], [("x", "=", 20), ("month", "=", 2)]]
    )
    assert either.to_pandas()["x"].tolist() == [1, 10, 20]
    none = DataConnector.from_parquet(tmp_path / "d", filters=[("month", ">", 7)])
    assert none.num_rows() == 0
    assert none.schema().field("month").type == pa.int32()
    assert DataConnector.from_parquet(tmp_path / "d/month=[12]", filters=[("month", "!=", 2)]).num_rows() == 2


def test_only_files_with_matching_rows_must_have_the_same_columns(write: Write, tmp_path: Path) -> None:
    write("d/2023.parquet", year=[2023], x=["old"])
    write("d/2024.parquet", year=[2024, 2024], x=[1.0, None])
    connector = DataConnector.from_parquet(tmp_path / "d", filters=[("year", ">=", 2024)])
    assert connector.schema().field("x").type == pa.float64()
    validate_columns(connector.source, ["x"], "year")
    assert connector.to_pandas()["x"].isna().tolist() == [False, True]


# Plans, splits, labels


def test_plans_splits_and_shards_count_the_matching_rows(write: Write, tmp_path: Path) -> None:
    numbers = np.random.RandomState(0).permutation(1000)
    for part in range(2):
        mine = numbers[part * 500 : (part + 1) * 500]
        write(f"d/{part}.parquet", row_group_size=70, x=mine, even=mine % 2 == 0)
    connector = ShardedDataConnector.from_parquet(tmp_path / "d", filters=[("even", "=", True), ("x", "<", 900)])
    expected = [int(x) for x in numbers if x % 2 == 0 and x < 900]
    assert connector.to_arrow()["x"].to_pylist() == expected
    parts = connector.random_split([0.7, 0.3], seed=3)
    assert [part.num_rows() for part in parts] == [315, 135]
    assert sorted(x for part in parts for x in part.to_arrow()["x"].to_pylist()) == sorted(expected)
    there = pickle.loads(pickle.dumps(connector))
    shards = [[x for table in there.ingester().iter_batches(shard, ["x"]) for x in table["x"].to_pylist()]
              for shard in connector.plan(3, seed=1)]  # fmt: skip
    assert sorted(x for shard in shards for x in shard) == sorted(expected)
    assert {len(shard) for shard in shards} == {150}
    again = DataConnector.from_spec(json.loads(parts[1].to_spec().model_dump_json()))
    assert again.to_arrow() == parts[1].to_arrow()
    assert again.digest() == parts[1].digest() != parts[0].digest()


def test_every_rank_of_a_gang_has_the_same_number_of_batches(write: Write) -> None:
    pytest.importorskip("torch")
    path = write("a.parquet", row_group_size=10, x=list(range(100)), keep=[i % 7 in (0, 3) for i in range(100)])
    connector = ShardedDataConnector.from_parquet(path, filters=[("keep", "=", True)])
    lengths, seen = [], set()
    try:
        for rank in range(3):
            set_current_position(GangPosition(rank, 3))
            dataset = connector.get_shard().to_torch_dataset(batch_size=4, shuffle=True, columns=["x"])
            batches = [batch["x"].tolist() for batch in dataset]
            lengths.append(len(batches))
            seen |= {x for batch in batches for x in batch}
    finally:
        set_current_position(ALONE)
    assert len(set(lengths)) == 1
    assert seen == {i for i in range(100) if i % 7 in (0, 3)}


def test_null_labels_outside_the_filter_do_not_matter(write: Write) -> None:
    path = write("a.parquet", row_group_size=4, x=list(range(8)), y=[None, 1.0, None, 2.0, 3.0, 4.0, 5.0, None])
    for filters in ([("y", ">=", 1)], [("x", "in", [1, 3, 4])]):
        source = DataConnector.from_parquet(path, filters=filters).source
        validate_columns(source, ["x"], "y")
        check_no_nulls(source, "y")
    with pytest.raises(DataError, match=r"row group 1: the label \"y\" is null in 1 of 4 rows"):
        check_no_nulls(DataConnector.from_parquet(path, filters=[("x", ">=", 4)]).source, "y")
    nothing = write("b.parquet", row_group_size=2, x=[0, 1, 2, 3], y=[None, None, 1.0, 2.0])
    with pytest.raises(DataError, match='"y" is null in every row'):
        validate_columns(DataConnector.from_parquet(nothing, filters=[("x", "<", 2)]).source, ["x"], "y")


# Errors


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (("mnth", ">", 3), 'no column "mnth"; did you mean "month"?'),
        (("month", ">", "3"), "of type int64, which cannot be compared with '3': give a number"),
        (("month", "=", True), "give a number"),
        (("text", "=", 3), "give a text"),
        (("flag", "=", 1), "give true or false"),
        (("flag", "<", True), 'use "=" or "!="'),
        (("day", ">", "March"), "give a date such as 2024-03-31"),
        (("day", ">", "2024-03-01T12:00:00"), "give a date"),
        (("time", ">", 5), "give a date or a timestamp"),
        (("time", ">", "2024-03-01T00:00:00+00:00"), "has no time zone, so give the time without a UTC offset"),
        (("time", ">", "2024-03-01T00:00:00.000000001"), "at most 6 decimals of a second"),
        (("list", "=", 1), "numbers, texts, booleans, dates and timestamps only"),
    ],
)
def test_a_term_that_does_not_fit_the_schema_is_refused(write: Write, term: Any, said: str) -> None:
    path = write(
        "a.parquet",
        month=[1], text=["a"], flag=[True], day=[dt.date(2024, 1, 1)], time=[dt.datetime(2024, 1, 1)], list=[[1]],
    )  # fmt: skip
    with pytest.raises(DataError) as caught:
        DataConnector.from_parquet(path, filters=[term]).num_rows()
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_matching_row_is_refused_before_training(write: Write) -> None:
    connector = DataConnector.from_parquet(write("a.parquet", month=[1, 2], y=[0.0, 1.0]), filters=[("month", ">", 7)])
    assert connector.num_rows() == 0
    assert connector.to_pandas().columns.tolist() == ["month", "y"]
    with pytest.raises(DataError, match=r"no row of \S*a\.parquet matches the filters \(month > 7\)"):
        validate_columns(connector.source, ["month"], "y")
    paths = [*connector.source.paths, write("b.parquet", month=[3], y=[0.0])]
    several = DataConnector.from_parquet(paths, filters=[("month", ">", 7)])
    with pytest.raises(DataError, match=r"no row of 2 paths, of which the first is \S*a\.parquet matches the filters"):
        validate_columns(several.source, ["month"], "y")


def test_a_file_that_changes_after_the_plan_is_refused(write: Write) -> None:
    path = write("a.parquet", x=[1, 2, 3])
    connector = DataConnector.from_parquet(path, filters=[("x", ">", 1)])
    assert connector.num_rows() == 2
    write("a.parquet", x=[1, 1, 3])
    with pytest.raises(DataError, match=r"a\.parquet was changed after .* \(another footer now\)"):
        connector.to_arrow()


def test_a_filtered_source_cannot_be_joined(write: Write) -> None:
    one = DataConnector.from_parquet(write("a.parquet", x=[1, 2]), filters=[("x", ">", 1)]).source
    with pytest.raises(InvalidArgumentError, match="a source with filters, which cannot be combined"):
        DataConnector.from_sources([one, write("b.parquet", x=[3])])
    assert DataConnector.from_sources([one]).num_rows() == 1


# Digests


def test_digest_of_filtered_rows_is_that_of_the_values(write: Write, tmp_path: Path) -> None:
    columns = {
        "i": pa.array([1, None, 3, 4], pa.int32()), "f": pa.array([0.5, None, math.nan, 2.0], pa.float32()),
        "t": pa.array(["a", None, "", "é"]), "b": [True, None, False, True], "d": [_DAYS[0], None, *_DAYS[:2]],
        "s": pa.array([_TIMES[0], None, *_TIMES[:2]], pa.timestamp("ms")), "l": [[1], None, [], [2, None]],
        "m": pa.array([Decimal("1.50"), None, Decimal("0.00"), Decimal("100.00")]),
    }  # fmt: skip
    wider = {
        **columns, "i": columns["i"].cast(pa.int64()), "f": columns["f"].cast(pa.float64()),
        "t": columns["t"].dictionary_encode(), "s": columns["s"].cast(pa.timestamp("us")),
        "m": columns["m"].cast(pa.decimal128(20, 5)),
    }  # fmt: skip
    write("a.parquet", row_group_size=1, row=range(4), **columns)
    write("b.parquet", **dict(reversed(list({"row": range(4), **wider}.items()))))
    digests = [
        DataConnector.from_parquet(tmp_path / f"{name}.parquet", filters=[("row", ">=", 0)]).digest() for name in "ab"
    ]
    assert digests[0] == digests[1]
    others = [DataConnector.from_parquet(tmp_path / "a.parquet", filters=[("row", *term)]).digest()
              for term in (("<", 3), ("!=", 0), ("=", 9))]  # fmt: skip
    assert len({digests[0], *others}) == 4
    table = pq.read_table(tmp_path / "a.parquet")
    for name in columns:
        position = table.column_names.index(name)
        swapped = table.set_column(position, name, table[name].take([0, 2, 1, 3]))
        assert rows_digest([swapped], swapped.schema) != rows_digest([table], table.schema), name


def test_digest_of_filtered_rows_leaves_out_columns_that_differ_between_files(write: Write, tmp_path: Path) -> None:
    def digest(x: float = 2.0, other: str = "a", **rest: Any) -> str:
        write(
            "d/1.parquet", row=[0, 1], x=pa.array([0.5, 1.0], pa.float32()), note=["a", "b"], gone=[1, 2], empty=[1, 2]
        )
        write("d/2.parquet", row=[2, 3], x=[x, None], empty=pa.nulls(2), **({"note": [other, None]} | rest))
        return DataConnector.from_parquet(tmp_path / "d", filters=[("row", ">=", 1)]).digest()

    assert digest() == digest() != digest(x=3.0)
    assert digest() != digest(other="c")
    retyped = digest(note=[1, 2])
    assert retyped == digest(note=[1, 3]) != digest(x=3.0, note=[1, 3])

    write("e/1.parquet", day=["2024-01-01"])
    write("e/2.parquet", day=[dt.date(2024, 1, 2)])
    days = [DataConnector.from_parquet(tmp_path / "e", filters=[("day", ">=", f"2024-01-0{day}")]) for day in (1, 1, 2)]
    digests = [each.digest() for each in days]
    assert digests[0] == digests[1] != digests[2]


def test_digest_of_filtered_rows_in_uniform_files_does_not_change(write: Write, tmp_path: Path) -> None:
    for month, rows in ((1, [0, 1]), (2, [2, 3])):
        write(f"d/month={month}/x.parquet", row=rows, x=[0.5, None], t=["a", None])
    connector = DataConnector.from_parquet(tmp_path / "d", filters=[("row", ">=", 1)])
    assert connector.digest() == "5be438e782369afc8721b64276d66d6f"


def test_parse_filters_is_repeatable() -> None:
    once = parse_filters([["a", "in", [1, 2]], ["b", "!=", "x"]])
    assert parse_filters(once) == once


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("operator", ["=", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("value", [0.1, 0.2, -0.0, 16777217, 1e39])
def test_a_number_is_rounded_to_the_type_of_a_float_column_as_in_pandas(write, type_, operator, value):
    numbers = np.array([-0.1, 0.0, 0.1, 0.2, 0.3], type_.to_pandas_dtype())
    path = write("a.parquet", x=pa.array(numbers, type_))
    compare = {"=": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[operator]

    with np.errstate(over="ignore"):
        expected = numbers[getattr(pd.Series(numbers), compare)(value)].tolist()

    def found(*filters: Any) -> list[float]:
        return DataConnector.from_parquet(path, filters=list(filters)).to_pandas()["x"].tolist()

    assert found(("x", operator, value)) == expected
    if operator in ("=", "!="):
        assert found(("x", {"=": "in", "!=": "not in"}[operator], [value, 7])) == expected
