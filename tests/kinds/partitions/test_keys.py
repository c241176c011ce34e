"""Keys of partitions: which rows have the same key, and which model a key selects, as pandas' groupby decides."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError
from shoal.kinds.partitions.bucket_rows import BucketReader, chunks_of, read_index, write_chunk
from shoal.kinds.partitions.keys import (
    bucket_of,
    check_same_kinds,
    encoded,
    key_column,
    key_text,
    key_type,
    keys_in,
    seed_of,
    type_of_columns,
)
from shoal.kinds.partitions.partition_messages import Bucket, ModelBytes, Outcome, Work
from shoal.kinds.partitions.partition_process import _Partitions
from shoal.kinds.partitions.partition_results import PartitionResults
from shoal.kinds.partitions.result_files import ResultWriter, complete_files, manifest_of

BERLIN = ZoneInfo("Europe/Berlin")
D = decimal.Decimal
NUMBERS = [0, 1, -1, 7, 200, 2**53, 2**53 + 1, 2**63, 0.5, -0.0, 1e300, D("0.1"), D("12.50"), float("nan"), None]
# The first two are 02:30 in Berlin, before and after clocks go back.
TIMES = [
    datetime.datetime(2024, 10, 27, 0, 30),
    datetime.datetime(2024, 10, 27, 1, 30),
    datetime.datetime(1970, 1, 1),
    None,
]
TEXTS = ["", "a", "1", "ä", "null", None]
KINDS: dict[str, tuple[list[pa.DataType], list[Any]]] = {
    "number": (
        [
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float16(), pa.float32(), pa.float64()),
            *(pa.decimal32(7, 2), pa.decimal64(16, 2), pa.decimal128(38, 2), pa.decimal256(60, 3)),
            pa.dictionary(pa.int8(), pa.int64()),
        ],
        NUMBERS,
    ),
    "timestamp with a time zone": (
        [*map(pa.timestamp, ["s", "ms", "us", "ns"], ["UTC", "Europe/Berlin", "+02:00", "America/New_York"])],
        TIMES,
    ),
    "timestamp without a time zone": ([*map(pa.timestamp, ["s", "ms", "us", "ns"])], TIMES),
    "text": ([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int16(), pa.string())], TEXTS),
    "bytes": ([pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1)], [b"a", b"1", b"", None]),
    "boolean": ([pa.bool_()], [True, False, None]),
    "date": ([pa.date32(), pa.date64()], [datetime.date(2024, 10, 27), datetime.date(1970, 1, 1), None]),
    "null": ([pa.null()], [None]),
}
TYPES = [(kind, type_) for kind, (types, _) in KINDS.items() for type_ in types]


def array(kind: str, type_: pa.DataType, positions: list[int]) -> pa.Array:
    """The values at these positions among those of the kind that the type can have."""
    fitting = []
    for value in KINDS[kind][1]:
        try:
            found = pa.array([value], type_)
        except (pa.ArrowException, OverflowError, TypeError):
            continue
        [back] = objects(found)
        if value is None or back == value or back != back or kind.startswith("timestamp"):
            fitting.append(value)
    return pa.array([fitting[position % len(fitting)] for position in positions], type_)


def objects(values: pa.Array) -> list[Any]:
    """The values as objects that pandas compares."""
    found = values.to_pylist()
    if pa.types.is_timestamp(values.type):
        found = [None if value is None else pd.Timestamp(value) for value in found]
    return found


def groups(values: list[Any]) -> list[int]:
    """The number of the group of each value, in pandas."""
    column = pd.Series(values, dtype=object)
    return column.groupby(column, dropna=False, sort=False).ngroup().tolist()


def texts(values: pa.Array) -> list[str]:
    codes, keys = encoded(pa.table({"key": pa.chunked_array([values.slice(0, 1), values.slice(1)])}), ["key"])
    assert len({*map(key_text, keys)}) == len(keys)
    return [key_text(keys[code]) for code in codes]


POSITIONS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(TYPES), POSITIONS, st.sampled_from(TYPES), POSITIONS)
@example(("number", pa.int64()), [5, 6, 5], ("number", pa.uint64()), [6, 5, 7])
@example(("number", pa.int64()), [6], ("number", pa.float64()), [5])
@example(("text", pa.string_view()), [0, 5], ("text", pa.string()), [0, 5])
def test_rows_have_the_model_of_their_group_in_pandas_or_are_refused(
    trained: tuple[str, pa.DataType], at: list[int], predicted: tuple[str, pa.DataType], others: list[int]
) -> None:
    models, rows = array(*trained, at), array(*predicted, others)
    types = [type_of_columns(pa.schema([("key", each.type)]), ["key"]) for each in (models, rows)]
    if len({trained[0], predicted[0]} - {"null"}) > 1:
        with pytest.raises(DataError, match=rf"are of type .*{predicted[0]}.*, but .* of type .*{trained[0]}"):
            check_same_kinds(types[1], types[0], ["key"])
        return
    check_same_kinds(types[1], types[0], ["key"])
    found = texts(models) + texts(rows)
    assert groups(found) == groups(objects(models) + objects(rows))


@pytest.mark.parametrize(("kind", "type_"), TYPES, ids=str)
def test_a_table_of_any_type_is_divided_as_by_pandas_and_its_results_are_found_by_value(
    kind: str, type_: pa.DataType, tmp_path: Path
) -> None:
    values = array(kind, type_, [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11])
    table = pa.table({"key": values, "position": range(len(values))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=5)
    data = DataConnector.from_parquet(tmp_path / "rows.parquet")
    found, schema = key_type(data.source, ["key"]), data.schema()
    for chunk in chunks_of(data.source.row_groups()):
        write_chunk(data.source, chunk, table.column_names, ["key"], 1, str(tmp_path))
    places = [place for _, place in read_index(str(tmp_path), chunk) or ()]
    reader = BucketReader(str(tmp_path), {name: schema.field(name).type for name in schema.names})
    work = Work(print, data.source, ("key", "position"), ("key",), str(tmp_path), 0, 1)
    partitions = _Partitions(work, reader, Bucket(places, frozenset(), {}, 10**9))
    rows = {text: partitions.table(text, key)["position"].to_pylist() for text, key in partitions.order}

    stored = data.to_arrow().column("key").combine_chunks()
    expected: dict[int, list[int]] = {}
    for position, group in enumerate(groups(objects(stored))):
        expected.setdefault(group, []).append(position)
    assert sorted(rows.values()) == sorted(expected.values())

    writer = ResultWriter(str(tmp_path / "results"), 0, found)
    (tmp_path / "results").mkdir()
    writer.expect(len(rows))
    for text, key in partitions.order:
        value = ModelBytes("pickle", text.encode())
        writer.add(Outcome(key, "succeeded", 1, len(rows[text]), 0.0, {}, "", "", value))
    writer.close()
    (tmp_path / "manifest.parquet").write_bytes(manifest_of(complete_files(str(tmp_path / "results"), found).values()))
    results = PartitionResults(str(tmp_path / "manifest.parquet"))
    assert {each.text for each in results} == {*rows}
    assert {key_text(each.key) for each in results} == {*rows}
    for position, value in enumerate(objects(stored)):
        assert position in rows[results[value].content().decode()]


def test_keys_of_several_columns_are_the_tuples_that_occur() -> None:
    rows = [(1, "a"), (2, None), (1, "b"), (1, "a"), (None, "a")]
    table = pa.table({"store": [row[0] for row in rows], "item": [row[1] for row in rows]})
    codes, keys = encoded(table, ["store", "item"])

    assert [keys[code] for code in codes] == rows
    type_ = pa.struct([("store", pa.int64()), ("item", pa.string())])
    assert keys_in(pa.chunked_array([key_column(keys, type_)])) == keys
    for by, said in (
        (["item", "store"], "the keys of the models are store, item: name the columns in this order"),
        (["store"], r"have 1 columns \(store\), but those of the models have 2"),
    ):
        with pytest.raises(DataError, match=said):
            check_same_kinds(type_of_columns(table.schema, by), type_, by)
    other = table.rename_columns(["item", "price"])
    with pytest.raises(DataError, match="the keys of the models are store, item: name the columns in this order"):
        check_same_kinds(type_of_columns(other.schema, ["item", "price"]), type_, ["item", "price"])
    wrong = table.set_column(1, "item", pa.array([1] * 5))
    with pytest.raises(DataError, match=r'in column "item" are of type int64 \(number\), but .* string \(text\)'):
        check_same_kinds(type_of_columns(wrong.schema, ["store", "item"]), type_, ["store", "item"])


def test_different_keys_have_different_texts() -> None:
    numbers: list[Any] = [1, "1", 1.5, "1.5", True, "True", D("0.1"), 0.1, 2**53, 2**53 + 1, float("inf")]
    others: list[Any] = [None, "null", b"null", datetime.date(2024, 1, 1), datetime.datetime(2024, 1, 1), "2024-01-01"]
    tuples: list[Any] = [(1, "a"), ("1", "a"), ("a|b", "c"), ("a", "b|c"), ("a|", "|c")]
    keys = [*numbers, *others, *tuples, *datetimes(fold=0), *datetimes(fold=1)]
    assert len({*map(key_text, keys)}) == len(keys)


def datetimes(fold: int) -> list[datetime.datetime]:
    return [datetime.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold)]


@pytest.mark.parametrize(
    "same",
    [
        [7, 7.0, D(7), D("7.00"), np.int8(7), np.uint64(7), np.float16(7), np.float32(7), np.longdouble(7)],
        [0.5, D("0.50"), np.float16(0.5)],
        [0, 0.0, -0.0],
        [None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, D("NaN"), np.datetime64("NaT")],
        [True, np.bool_(True)],
        ["a", np.str_("a")],
        [
            *datetimes(fold=1),
            datetime.datetime(2024, 10, 27, 1, 30, tzinfo=datetime.UTC),
            pd.Timestamp("2024-10-27 01:30", tz="UTC").tz_convert("America/New_York").as_unit("ns"),
        ],
        [datetime.datetime(2024, 1, 1, 12), pd.Timestamp("2024-01-01 12:00"), np.datetime64("2024-01-01T12:00", "ns")],
        [datetime.date(2024, 1, 1), np.datetime64("2024-01-01")],
        [(1, "a"), (1.0, np.str_("a"))],
    ],
    ids=lambda same: str(same[0]),
)
def test_a_key_is_its_value_and_not_its_type(same: list[Any]) -> None:
    assert len({*map(key_text, same)}) == 1


def test_two_hours_with_one_name_are_two_keys_for_the_function_too() -> None:
    hours = pd.to_datetime(["2024-10-27 00:30", "2024-10-27 01:30"], utc=True).tz_convert("Europe/Berlin")
    for unit in ("s", "us", "ns"):
        _, keys = encoded(pa.table({"hour": pa.array([*hours], pa.timestamp(unit, "Europe/Berlin"))}), ["hour"])
        assert keys == [*hours]
        assert len({*keys}) == 2


@pytest.mark.parametrize(
    ("type_", "values", "said"),
    [
        (pa.list_(pa.int64()), [[1]], "whose values cannot be keys of partitions"),
        (pa.time64("us"), [1], "whose values cannot be keys"),
        (pa.date32(), [10**7], 'column "key" have a value of type date32.* that Python cannot represent'),
        (pa.timestamp("s"), [10**13], "Python cannot represent"),
    ],
)
def test_values_that_cannot_be_keys_are_refused(type_: pa.DataType, values: list[Any], said: str) -> None:
    table = pa.table({"key": pa.array(values, type_)})
    with pytest.raises(DataError, match=said):
        (type_of_columns(table.schema, ["key"]), encoded(table, ["key"]))


def test_a_list_is_no_key() -> None:
    for key in (["a"], {"a": 1}, np.array([1, 2])):
        with pytest.raises(InvalidArgumentError, match="is not a key of a partition"):
            key_text(key)


def test_buckets_and_seeds_are_the_same_in_every_process() -> None:
    assert [bucket_of(key_text(key), 32) for key in (1, "a", None)] == [25, 15, 19]
    assert seed_of(0, "int:1") != seed_of(1, "int:1")
