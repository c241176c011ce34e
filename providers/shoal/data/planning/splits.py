"""Compute which rows of each row group belong to a part of a random split, using only the row counts from the footers.

The size of each part is exact: the share of all rows that corresponds to the part's weight, rounded to a whole number.
Rows are selected separately in every row group, so that each part has its share of every file. The same rows, weights
and seed give the same parts on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a random split, described by the weights of all parts, the index of this part and the seed.

    Args:
        weights: Relative sizes of all the parts.
        index: Index of this part, from 0.
        seed: Seed of the split.
    """

    weights: tuple[float, ...]
    index: int
    seed: int

    def __post_init__(self) -> None:
        if not self.weights or not all(isfinite(weight) and weight > 0 for weight in self.weights):
            raise InvalidArgumentError(f"the weights of a split must be positive numbers, not {list(self.weights)}")
        if not 0 <= self.index < len(self.weights):
            raise InvalidArgumentError(
                f"a split into {len(self.weights)} parts has no part {self.index}: the index must be from 0 to "
                f"{len(self.weights) - 1}"
            )

    def counts(self, before: int, rows: int) -> list[int]:
        """Compute how many rows of one row group each part of the random split gets."""
        # The weights are converted to exact fractions, such as 29/100 for 0.29. With floats, 0.29 * 100 is
        # 28.999999999999996, and a row would be missing.
        weights = [Fraction(str(weight)) for weight in self.weights]
        counts = []
        for part, weight in enumerate(weights):
            share = weight / sum(weights[part:])
            taken = int(before * share)
            count = int((before + rows) * share) - taken
            counts.append(count)
            before, rows = before - taken, rows - count
        return counts


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Rows of one row group that remain after several random splits were applied one after the other.

    Args:
        rows: Number of rows of the row group in the file.
        steps: For each split, in the order of application: the split, and the number of rows that the split divides in
            all previous row groups.
        key: Identifier of the row group that does not depend on the name of its directory.
    """

    rows: int
    steps: tuple[tuple[Split, int], ...]
    key: str

    @property
    def selected(self) -> int:
        """Number of rows of this row group that remain after all random splits were applied."""
        rows = self.rows
        for split, before in self.steps:
            rows = split.counts(before, rows)[split.index]
        return rows

    def indices(self) -> np.ndarray:
        """Return the positions of the rows that remain after all random splits were applied, as an int64 array in
        ascending order."""
        import numpy as np

        indices = np.arange(self.rows)
        for level, (split, before) in enumerate(self.steps):
            digest = hashlib.sha256(f"{split.seed}/{level}/{self.key}".encode()).digest()
            # RandomState is used, because NumPy guarantees that the random numbers of this class never change. The
            # random numbers of the newer class Generator may change with a NumPy release.
            order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(len(indices))
            counts = split.counts(before, len(indices))
            start = sum(counts[: split.index])
            indices = indices[np.sort(order[start : start + counts[split.index]])]
        return indices


def select(rows: Sequence[int], keys: Sequence[str], splits: Sequence[Split]) -> list[GroupSelection]:
    """Apply several random splits one after the other, and return the remaining rows of each row group."""
    steps: list[tuple[tuple[Split, int], ...]] = [() for _ in rows]
    left = list(rows)
    for split in splits:
        before = 0
        for i, count in enumerate(left):
            steps[i] = (*steps[i], (split, before))
            left[i] = split.counts(before, count)[split.index]
            before += count
    return [GroupSelection(count, step, key) for count, step, key in zip(rows, steps, keys, strict=True)]
