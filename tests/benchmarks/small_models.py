"""Many small models one after the other, side by side, and in a pool's queue: what each costs beside its training.

A model for each month of flights, as a model per carrier or per store would be. Every way is a process of its own that
has trained one model before it is measured. The ways take turns, and only one of them is up at a time.

Run it with ``python -m tests.benchmarks.small_models``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from shoal.examples.flights import FEATURES, LABEL, month_files
from tests.benchmarks.report import table
from tests.benchmarks.side import Side

ROUNDS = 50
POOL = "small-models"

Answer = Callable[[Sequence[str]], None]
"""Trains one model for each of these files."""


@contextmanager
def plain() -> Iterator[Answer]:
    """A loop in one process, with one thread, like each of the other ways' workers."""
    import pyarrow.parquet as pq
    import xgboost

    def fit(file: str) -> None:
        rows = pq.read_table(file, columns=[*FEATURES, LABEL])
        matrix = xgboost.QuantileDMatrix(rows.select(FEATURES), rows[LABEL].to_numpy(), nthread=1)
        xgboost.train({"nthread": 1}, matrix, ROUNDS)

    yield lambda files: [fit(file) for file in files] and None


@contextmanager
def dask() -> Iterator[Answer]:
    """A loop over `xgboost.dask` on a local cluster that is up."""
    import dask.dataframe
    from distributed import Client, LocalCluster
    from xgboost import dask as dxgb

    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalCluster(
            1, threads_per_worker=1, dashboard_address=None, local_directory=scratch, memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):

        def fit(file: str) -> None:
            frame = dask.dataframe.read_parquet(file, columns=[*FEATURES, LABEL]).persist()
            matrix = dxgb.DaskQuantileDMatrix(client, frame[list(FEATURES)], frame[LABEL])
            dxgb.train(client, {"nthread": 1}, matrix, ROUNDS)

        yield lambda files: [fit(file) for file in files] and None


@contextmanager
def script(threads: int = 1) -> Iterator[Answer]:
    """`fit` of an estimator in a script, as many at once as there are threads."""
    from shoal.data import DataConnector
    from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig

    def fit(file: str) -> None:
        size = XGBScalingConfig(num_workers=1, num_cpu_per_worker=1)
        XGBEstimator(ROUNDS, scaling_config=size).fit(DataConnector.from_parquet(file), list(FEATURES), LABEL)

    def answer(files: Sequence[str]) -> None:
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(fit, files))

    yield answer


@contextmanager
def queue() -> Iterator[Answer]:
    """All jobs are submitted to a pool at once, and wait in its queue for one of two CPUs; nothing is tracked."""
    from shoal import ComputePool
    from shoal.jobs import parse_spec, submit

    def spec(file: str) -> dict[str, Any]:
        return {
            "framework": "xgboost",
            "dataset": {"paths": [file]},
            "input_cols": list(FEATURES),
            "label_col": LABEL,
            "n_estimators": ROUNDS,
            "scaling_config": {"num_workers": 1, "num_cpu_per_worker": 1},
            "tracking": None,
            "run_config": {"pool_name": POOL},
        }

    def answer(files: Sequence[str]) -> None:
        for handle in [submit(parse_spec(spec(file))) for file in files]:
            handle.wait()

    pool = ComputePool(f"local://{POOL}?max_nodes=1&cpus_per_node=2").up()
    try:
        yield answer
    finally:
        pool.down()


WAYS: dict[str, Callable[[], AbstractContextManager[Answer]]] = {
    "plain, a loop": plain,
    "Dask, a loop": dask,
    "shoal, a loop of fit": script,
    "shoal, two fits at once": partial(script, 2),
    "shoal, all in a pool's queue": queue,
}


def turn(way: str, files: Sequence[str]) -> float:
    """Train a model per file in a new process that has trained one before, and return the seconds."""
    side = Side(WAYS[way])
    try:
        side.ask(files[:1])
        began = time.perf_counter()
        side.ask(files)
        return time.perf_counter() - began
    finally:
        side.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time many small trainings on one pool.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="turns, of which the median counts (default 3)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        home = Path(folder, "shoal")
        home.mkdir(mode=0o700)
        os.environ["SHOAL_HOME"] = str(home)
        files = month_files(range(1, 13), Path(folder, "flights"))
        turns = [{way: turn(way, files) for way in args.ways} for _ in range(args.repeat)]
    seconds = {way: median(each[way] for each in turns) for way in args.ways}
    alone = seconds[args.ways[0]]
    rows = [
        [way, f"{took:.1f}", f"{took / len(files):.2f}", f"{(took - alone) / len(files):+.2f}", f"{took / alone:.2f}"]
        for way, took in seconds.items()
    ]
    head = [f"xgboost, {len(files)} models of 27 k x 16, {ROUNDS} rounds", "seconds", "each, s",
            f"against {args.ways[0]}, s", "x"]  # fmt: skip
    print(table(head, rows))


if __name__ == "__main__":
    main()
