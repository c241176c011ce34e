"""A sample of all rows, to which each worker contributes its part in proportion. Depends on plan and seed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.training.boosting.rows import ShardRows

_SAMPLE_ROWS = 200_000
"""LightGBM's own default of `bin_construct_sample_cnt`."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of the whole a worker has.

    Args:
        rank: Its rank.
        before: Rows of the ranks before it.
        rows: Its rows.
        total: All rows.
    """

    rank: int
    before: int
    rows: int
    total: int

    def chosen(self, wanted: int, seed: int) -> np.ndarray:
        """Its part of a sample: numbers of rows in its shard, ascending.

        Args:
            wanted: Rows in the whole sample.
            seed: With the share, all that the choice depends on.
        """
        wanted = min(wanted, self.total)
        count = (self.before + self.rows) * wanted // self.total - self.before * wanted // self.total
        if count == self.rows:
            return np.arange(self.rows)
        return np.sort(np.random.default_rng([seed, self.rank]).choice(self.rows, count, replace=False))


def shares(rows: Sequence[int]) -> list[Share]:
    """Every worker's share, by rank.

    Args:
        rows: Rows of each shard, by rank.
    """
    ends = np.cumsum(rows)
    return [
        Share(rank, int(end) - count, count, int(ends[-1]))
        for rank, (count, end) in enumerate(zip(rows, ends, strict=True))
    ]


def sample(rows: ShardRows, share: Share, params: Mapping[str, Any], seed: int) -> np.ndarray:
    """This worker's part of the sample, in one pass over its rows.

    Args:
        rows: The shard.
        share: Which of all rows it has.
        params: LightGBM's parameters; they may say how large the sample is.
        seed: Seed of the choice.

    Returns:
        float32 ``[rows, columns]``.
    """
    chosen = share.chosen(int(params.get("bin_construct_sample_cnt", _SAMPLE_ROWS)), seed)
    parts = [np.empty((0, len(rows.columns.features)), np.float32)]
    start = 0
    for batch in rows:
        stop = start + len(batch.data)
        first, last = np.searchsorted(chosen, (start, stop))
        parts.append(batch.data[chosen[first:last] - start])
        start = stop
    return np.concatenate(parts)
