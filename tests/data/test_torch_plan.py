"""The order of a torch dataset: what is cut, repeated and held together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import shuffling
from shoal.data.planning import RowRange, cut
from shoal.data.shuffling import shuffled_windows
from shoal.data.torch_dataset import count_items, evened, share_of


def line_of(sizes: list[int]) -> list[RowRange]:
    return [RowRange("/f", i, 10 * i, 10 * i + rows) for i, rows in enumerate(sizes)]


def rows_in(line: list[RowRange]) -> list[tuple[int, int]]:
    return [(part.row_group, row) for part in line for row in range(part.start, part.stop)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5000), st.none() | st.integers(1, 700), st.booleans(), st.integers(1, 7))
def test_workers_share_every_row_and_item_once(
    rows: int, batch_size: int | None, drop_last: bool, num_workers: int
) -> None:
    shares = [share_of(rows, batch_size, drop_last, worker, num_workers) for worker in range(num_workers)]
    assert sum(share.items for share in shares) == count_items(rows, batch_size, drop_last)
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == rows
    for share in shares:
        assert share.items <= count_items(share.stop - share.start, batch_size, drop_last)
    if batch_size is None:
        assert max(share.items for share in shares) <= 1.2 * rows / num_workers + 1


@pytest.mark.parametrize("batch_size", [8, 32, 64])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_rows_of_workers_fill_the_usual_batches(batch_size: int, num_workers: int) -> None:
    shares = [share_of(100_003, None, False, worker, num_workers) for worker in range(num_workers)]
    assert sum(-(-share.items // batch_size) for share in shares) == -(-100_003 // batch_size)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 7))
def test_line_is_evened_with_its_own_rows(sizes: list[int], more: int, first: int) -> None:
    line = line_of(sizes)
    have = rows_in(line)
    longer = rows_in(evened(line, len(have) + more, first % len(line)))
    assert longer[: len(have)] == have and len(longer) == len(have) + more
    counts = [longer.count(row) for row in have]
    assert sum(counts) == len(longer) and max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 10), max_size=8), st.integers(0, 90), st.integers(0, 90))
def test_cut_is_a_slice(sizes: list[int], start: int, stop: int) -> None:
    line = line_of(sizes)
    assert rows_in(cut(line, start, stop)) == rows_in(line)[start:stop]


@given(st.lists(st.integers(1, 10), max_size=30), st.integers(1, 40))
def test_windows_are_bounded_and_hold_every_range_once(sizes: list[int], row_bytes: int) -> None:
    line = line_of(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffling, "BUFFER_ROWS", 12)
        patch.setattr(shuffling, "BUFFER_BYTES", 500)
        found = shuffled_windows(line, row_bytes)
    assert [part for window in found for part in sorted(window)] == [part for window in found for part in window]
    assert sorted(part for window in found for part in window) == line
    for window in found:
        assert len(window) == 1 or sum(part.rows for part in window) * row_bytes <= 500
        assert len(window) <= 12
