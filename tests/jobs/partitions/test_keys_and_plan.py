"""Keys of partitions, and the plan: which rows are divided together, and which worker processes which buckets."""

from __future__ import annotations

import datetime
import decimal
from itertools import permutations
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from shoal.data.planning import RowGroup
from shoal.jobs.partitions.keys import bucket_of, encoded, key_column, key_text, keys_in, seed_of
from shoal.jobs.partitions.plan import chunks_of, dealt, largest_first, number_of_buckets

TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [3, None, -1, 3]),
    (pa.uint8(), [3, 200]),
    (pa.string(), ["a", "", "a", None, "ä"]),
    (pa.bool_(), [True, False, None]),
    (pa.float64(), [0.5, -0.0, 0.0, float("nan"), None]),
    (pa.date32(), [datetime.date(2026, 1, 1), None]),
    (pa.timestamp("us", "UTC"), [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)]),
    (pa.timestamp("ns"), [pd.Timestamp("2026-01-01 00:00:00.000000001")]),
    (pa.decimal128(5, 2), [decimal.Decimal("1.50")]),
    (pa.dictionary(pa.int8(), pa.string()), ["b", "a", None, "b"]),
]


@pytest.mark.parametrize(("type_", "values"), TYPES, ids=lambda value: str(value))
def test_a_key_has_the_type_of_its_column(type_: pa.DataType, values: list[Any]) -> None:
    column = pa.chunked_array([pa.array(values[:1], type_), pa.array(values[1:], type_)])
    codes, keys = encoded(pa.table({"key": column}), ["key"])

    expected = [None if value is None or value != value else value for value in values]
    assert [keys[code] for code in codes] == expected
    assert len({*map(key_text, keys)}) == len(keys) == len({*expected})
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    assert keys_in(pa.chunked_array([key_column(keys, plain)])) == keys


def test_keys_of_several_columns_are_the_tuples_that_occur() -> None:
    rows = [(1, "a"), (2, None), (1, "b"), (1, "a"), (None, "a")]
    table = pa.table({"store": [row[0] for row in rows], "item": [row[1] for row in rows]})
    codes, keys = encoded(table, ["store", "item"])

    assert [keys[code] for code in codes] == rows
    type_ = pa.struct([("store", pa.int64()), ("item", pa.string())])
    assert keys_in(pa.chunked_array([key_column(keys, type_)])) == keys


def test_different_keys_have_different_texts() -> None:
    keys: list[Any] = [1, "1", 1.0, True, None, "null", (1, "a"), ("1", "a"), ("a|b", "c"), ("a", "b|c"), ("a|", "|c")]
    assert len({*map(key_text, keys)}) == len(keys)


def test_buckets_and_seeds_are_the_same_in_every_process() -> None:
    assert [bucket_of(key_text(key), 32) for key in (1, "a", None)] == [25, 15, 19]
    assert seed_of(0, "int:1") != seed_of(1, "int:1")


def test_chunks_are_whole_row_groups_in_the_order_of_the_dataset() -> None:
    groups = [RowGroup("f", index, rows) for index, rows in enumerate([60_000, 0, 60_000, 250_000, 10])]
    chunks = chunks_of(groups)
    assert [[part.row_group for part in chunk.ranges] for chunk in chunks] == [[0, 2], [3], [4]]
    assert sum(chunk.rows for chunk in chunks) == 370_010
    assert len(chunks_of([RowGroup("f", index, 1_000_000) for index in range(1_000)])) <= 64


def test_the_number_of_buckets_grows_with_the_rows() -> None:
    assert [number_of_buckets(rows) for rows in (1, 3_000_000, 10**9)] == [32, 150, 1024]


def test_the_largest_buckets_are_dealt_first_to_the_worker_with_the_fewest_rows() -> None:
    for order in permutations({1: 5, 2: 9, 3: 0, 4: 4}.items()):
        assert largest_first(dict(order)) == [2, 1, 4]
        assert dealt(dict(order), 2) == ((2,), (1, 4))
