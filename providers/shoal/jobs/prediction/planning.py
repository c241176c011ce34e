"""Divide a dataset into output files and the files among the workers, in the order of the rows. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.data.planning.row_groups import RowGroup, RowRange

_FILE_ROWS = 1_000_000
"""Number of rows after which the next row group begins a new file. Fewer, larger files are quicker to list and open."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file of predictions.

    Args:
        first_row: Position of its first row in the dataset, from 0.
        ranges: Rows of the dataset, in order.
    """

    first_row: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(part.rows for part in self.ranges)

    @property
    def name(self) -> str:
        """Name of the file. Names sort in the order of the rows, and tell which rows a file has."""
        return f"part-{self.first_row:012d}-{self.rows}.parquet"


def plan_files(row_groups: Sequence[RowGroup], num_workers: int) -> tuple[tuple[OutputFile, ...], ...]:
    """Divide the rows among the workers, each a contiguous share, and each share into files.

    Args:
        row_groups: Row groups of the dataset, in order.
        num_workers: Number of workers.

    Returns:
        The files of each worker, by rank. The shares differ by at most one row, and at most ``num_workers - 1`` row
        groups are cut. A worker has no file if there are fewer rows than workers.
    """
    total = sum(group.rows for group in row_groups)
    borders = [total * rank // num_workers for rank in range(num_workers + 1)]
    return tuple(
        tuple(_files(list(_between(row_groups, start, stop)), start)) for start, stop in itertools.pairwise(borders)
    )


def _between(row_groups: Sequence[RowGroup], start: int, stop: int) -> Iterator[RowRange]:
    """Yield the ranges of the rows ``start <= i < stop`` of the dataset."""
    at = 0
    for group in row_groups:
        first, last = max(start - at, 0), min(stop - at, group.rows)
        if first < last:
            yield RowRange(group.path, group.index, first, last)
        at += group.rows


def _files(ranges: Sequence[RowRange], start: int) -> Iterator[OutputFile]:
    pending: list[RowRange] = []
    for part in ranges:
        pending.append(part)
        if sum(each.rows for each in pending) >= _FILE_ROWS:
            file = OutputFile(start, tuple(pending))
            yield file
            start, pending = start + file.rows, []
    if pending:
        yield OutputFile(start, tuple(pending))
