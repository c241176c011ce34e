"""Training from Parquet files to a model: shoal against plain libraries, Dask and Ray Train, each warm.

Every side is a process of its own whose cluster is up, and has trained once before it is measured. They take turns, so
that a busy machine slows all alike, and only one is up at a time, so that idle clusters take nothing from it. Memory is
that of the side's whole process tree, its cluster included.

Run it with ``python -m tests.benchmarks.gradient_boosting``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq

from shoal.data.numpy_columns import to_matrix
from tests.benchmarks import peers
from tests.benchmarks.datasets import MAKE, Data, small
from tests.benchmarks.peers import Fit, Library, Trained
from tests.benchmarks.report import table
from tests.benchmarks.side import Side
from tests.benchmarks.turns import Taken, take_turns

PLAIN, SHOAL, RAY_TRAIN = "plain", "shoal", "Ray Train"
SIDES: dict[str, Callable[..., AbstractContextManager[Fit]]] = {
    PLAIN: peers.plain,
    "shoal, a pool's job": peers.shoal_pool,
    SHOAL: peers.shoal,
    "shoal, external memory": peers.shoal_external,
    "Dask": peers.dask,
    RAY_TRAIN: peers.ray_train,
}
_XGBOOST_ONLY = {"shoal, external memory"}


def seconds(taken: Taken[Trained]) -> float:
    """Of the fastest turn: on a shared machine, the one that was disturbed least."""
    return min(turn.seconds for turn in taken.turns)


def above_idle(taken: Taken[Trained], shard_bytes: float) -> str:
    """The workers' highest memory above their idle size, in shards; only shoal tells."""
    grown = [each.peak_rss_bytes - each.idle_rss_bytes for turn in taken.turns for each in turn.workers]
    return f"{max(grown) / shard_bytes:.2f}" if grown else ""


def measure(data: Data, library: Library, names: Sequence[str], workers: int, repeat: int) -> dict[str, Taken[Trained]]:
    """Train with every side.

    Args:
        data: What to train on.
        library: With what.
        names: The sides.
        workers: One-thread workers, or threads of a side that has one process.
        repeat: Turns; Ray Train, which takes a minute and more, has one.
    """
    sides = {name: partial(Side, SIDES[name], library, workers) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        return take_turns(sides, small(Path(folder) / "january"), data, repeat, once=[RAY_TRAIN])


def rmse(model: bytes, library: Library, data: Data) -> float:
    """Of a model, on the rows that models are judged by."""
    rows = pq.read_table(data.judged_by, columns=[*data.features, data.label])
    features, label = to_matrix(rows, data.features), rows[data.label].to_numpy()
    if library == "xgboost":
        import xgboost

        predicted = xgboost.Booster(model_file=bytearray(model)).inplace_predict(features)
    else:
        import lightgbm

        predicted = lightgbm.Booster(model_str=model.decode()).predict(features)
    return float(np.sqrt(np.mean((predicted - label) ** 2)))


def show(data: Data, library: Library, taken: dict[str, Taken[Trained]], workers: int) -> str:
    """A table of one dataset and library, in Markdown."""
    plain = taken.get(PLAIN)
    rows = []
    for name, side in taken.items():
        if side.failure is not None:
            rows.append([name, "failed", side.failure.splitlines()[0][:60], "", "", "", ""])
            continue
        against = plain if plain and plain.failure is None else None
        rows.append(
            [
                name,
                f"{seconds(side):.1f}",
                f"{seconds(side) / seconds(against):.2f}" if against else "",
                f"{side.peak_bytes >> 20:,}",
                f"{side.peak_bytes / against.peak_bytes:.2f}" if against else "",
                above_idle(side, data.shard_bytes / workers),
                f"{rmse(side.turns[-1].model, library, data):.4f}",
            ]
        )
    head = [f"{library}, {data.name}, {data.rounds} rounds", "seconds", "x plain", "peak MiB", "x plain",
            "worker, in shards", "RMSE"]  # fmt: skip
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time training from Parquet to a model against every peer.")
    parser.add_argument("--data", nargs="+", choices=MAKE, default=list(MAKE), help="datasets (default: all)")
    parser.add_argument("--library", nargs="+", choices=get_args(Library), default=get_args(Library))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="sides (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="one-thread workers, or threads (default 2)")
    parser.add_argument("--repeat", type=int, default=1, help="turns, of which the fastest counts (default 1)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        for name in args.data:
            data = MAKE[name](Path(folder))
            for library in args.library:
                sides = [side for side in args.sides if library == "xgboost" or side not in _XGBOOST_ONLY]
                taken = measure(data, library, sides, args.workers, args.repeat)
                print(show(data, library, taken, args.workers), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
