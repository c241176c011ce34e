"""Divide the rows of a dataset among the workers of a batch prediction, and among the files that each worker writes.

The functions only compute, and do not read or write files.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.data.planning import RowGroup, RowRange
from shoal.jobs.prediction import output_files


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Plan of one output file: the rows of the dataset whose predictions are written to the file.

    Args:
        first_row: Position of the file's first row in the dataset, from 0.
        ranges: The parts of the dataset's row groups that contain the file's rows, in order.
    """

    first_row: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """Return the number of rows in the file."""
        return sum(part.rows for part in self.ranges)

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return output_files.file_name(self.first_row, self.rows)


def plan_files(row_groups: Sequence[RowGroup], num_workers: int) -> tuple[tuple[OutputFile, ...], ...]:
    """Divide the rows into one contiguous share per worker, and each share into files."""
    total = sum(group.rows for group in row_groups)
    borders = [total * rank // num_workers for rank in range(num_workers + 1)]
    return tuple(
        tuple(_files(list(_between(row_groups, start, stop)), start)) for start, stop in itertools.pairwise(borders)
    )


def _between(row_groups: Sequence[RowGroup], start: int, stop: int) -> Iterator[RowRange]:
    """Yield the parts of row groups that contain the rows ``start`` (inclusive) to ``stop`` (exclusive)."""
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
        if sum(each.rows for each in pending) >= output_files.FILE_ROWS:
            file = OutputFile(start, tuple(pending))
            yield file
            start, pending = start + file.rows, []
    if pending:
        yield OutputFile(start, tuple(pending))
