"""The plan: which rows are divided together, and which worker processes which buckets."""

from __future__ import annotations

from itertools import permutations

from shoal.data.planning import RowGroup
from shoal.kinds.partitions.bucket_rows import chunks_of, dealt, largest_first, number_of_buckets


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
