"""Random splits by recipe: which rows of a row group belong to which part, told from the footers' row counts.

A split is exact (the parts' sizes are those of the whole, rounded), drawn anew within every row group (so that each
part has its share of every file), and repeatable: the same rows, weights and seed give the same parts on any machine.
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
    """One part of a random split.

    Args:
        weights: Relative sizes of all the parts.
        index: Which of them this is.
        seed: Seed of the split.
    """

    weights: tuple[float, ...]
    index: int
    seed: int

    def __post_init__(self) -> None:
        if not self.weights or not all(isfinite(weight) and weight > 0 for weight in self.weights):
            raise InvalidArgumentError(f"the weights of a split must be positive numbers, not {list(self.weights)}")
        if not 0 <= self.index < len(self.weights):
            raise InvalidArgumentError(f"a split into {len(self.weights)} parts has no part {self.index}")

    def counts(self, before: int, rows: int) -> list[int]:
        """Divides one row group among the parts.

        Args:
            before: Rows of the row groups that come before it.
            rows: Rows of this one.

        Returns:
            Rows of it that go to each part; they sum up to `rows`. Over all row groups each part gets its share of the
            whole, rounded.
        """
        # Fractions of the decimals that the user wrote: 0.29 * 100 is 28.999999999999996 in floats.
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
    """What a chain of splits leaves of one row group.

    Args:
        rows: Rows in the file.
        steps: Per split of the chain: the split, and the rows of the row groups before this one that it was taken of.
        key: What tells this row group from all others, however the directory is called.
    """

    rows: int
    steps: tuple[tuple[Split, int], ...]
    key: str

    @property
    def selected(self) -> int:
        """Number of rows that are left."""
        rows = self.rows
        for split, before in self.steps:
            rows = split.counts(before, rows)[split.index]
        return rows

    def indices(self) -> np.ndarray:
        """Positions in the row group of the rows that are left, int64, ascending."""
        import numpy as np

        indices = np.arange(self.rows)
        for level, (split, before) in enumerate(self.steps):
            digest = hashlib.sha256(f"{split.seed}/{level}/{self.key}".encode()).digest()
            # RandomState, because NumPy has frozen its streams; a Generator's may change with a release.
            order = np.random.RandomState(np.frombuffer(digest, dtype="<u4")).permutation(len(indices))
            counts = split.counts(before, len(indices))
            start = sum(counts[: split.index])
            indices = indices[np.sort(order[start : start + counts[split.index]])]
        return indices


def select(rows: Sequence[int], keys: Sequence[str], splits: Sequence[Split]) -> list[GroupSelection]:
    """Applies a chain of splits to row groups.

    Args:
        rows: Rows of each row group, in an order that does not depend on how the files were listed.
        keys: Key of each.
        splits: The chain; each is taken of what the one before left.

    Returns:
        The selection of each row group.
    """
    steps: list[tuple[tuple[Split, int], ...]] = [() for _ in rows]
    left = list(rows)
    for split in splits:
        before = 0
        for i, count in enumerate(left):
            steps[i] = (*steps[i], (split, before))
            left[i] = split.counts(before, count)[split.index]
            before += count
    return [GroupSelection(count, step, key) for count, step, key in zip(rows, steps, keys, strict=True)]
