"""`XGBEstimator.fit` on a year of flights, cold and warm, against plain single-process XGBoost with as many threads.

Every figure is wall time from Parquet files to a model, and every side gets a process of its own: the plain one reads
the files with Arrow into a quantised matrix, which is its fastest way. The two take turns, so that a busy machine slows
both.

Run it with ``python -m tests.benchmarks.xgboost_flights``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def serve_plain(
    pipe: Connection, files: Sequence[str], columns: Sequence[str], label: str, args: argparse.Namespace
) -> None:
    """Trains in one process, once per request."""
    import pyarrow.parquet as pq
    import xgboost

    from shoal.training import memory

    while pipe.recv():
        memory.reset_peak()
        began = time.perf_counter()
        table = pq.read_table(files, columns=[*columns, label])
        matrix = xgboost.QuantileDMatrix(table.select(columns), table[label].to_numpy(), nthread=args.workers)
        xgboost.train({"nthread": args.workers}, matrix, args.rounds)
        pipe.send((time.perf_counter() - began, memory.peak_rss_bytes()))


def serve_shoal(
    pipe: Connection, files: Sequence[str], columns: Sequence[str], label: str, args: argparse.Namespace
) -> None:
    """Trains on a Ray of its own, once per request; the first is the cold one."""
    import ray

    from shoal.data import DataConnector
    from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig

    ray.init(
        address="local", num_cpus=args.workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    while pipe.recv():
        began = time.perf_counter()
        estimator = XGBEstimator(
            args.rounds, scaling_config=XGBScalingConfig(num_workers=args.workers, num_cpu_per_worker=1)
        )
        estimator.fit(DataConnector.from_parquet(files), columns, label)
        seconds = time.perf_counter() - began
        pipe.send((seconds, sum(worker.peak_rss_bytes for worker in estimator.get_result().workers)))
    ray.shutdown()


class Side:
    """One of the peers, in a process of its own."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args))
        self._process.start()

    def fit(self) -> tuple[float, int]:
        """Seconds, and peak resident bytes."""
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per kind of fit."""
    from shoal.examples.flights_data import FEATURES, LABEL, month_files

    with tempfile.TemporaryDirectory() as folder:
        files = month_files(range(1, 13), Path(folder) / "flights")
        sides = [Side(serve, files, list(FEATURES), LABEL, args) for serve in (serve_plain, serve_shoal)]
        plain, shoal = sides
        try:
            plain.fit()
            cold = shoal.fit()
            turns = [(plain.fit(), shoal.fit()) for _ in range(args.repeat)]
        finally:
            for side in sides:
                side.close()
    plain_seconds = statistics.median(turn[0][0] for turn in turns)
    warm_seconds = statistics.median(turn[1][0] for turn in turns)
    rows = [
        (f"plain XGBoost, {args.workers} threads", plain_seconds, max(turn[0][1] for turn in turns)),
        (f"shoal, cold, {args.workers} workers", *cold),
        (f"shoal, warm, {args.workers} workers", warm_seconds, max(turn[1][1] for turn in turns)),
    ]
    return [
        {
            "fit": name,
            "seconds": round(seconds, 2),
            "times_plain": round(seconds / plain_seconds, 2),
            "peak_mib": peak >> 20,
        }
        for name, seconds, peak in rows
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time XGBEstimator.fit against plain XGBoost on 327,346 flights.")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of boosting (default 100)")
    parser.add_argument(
        "--workers", type=int, default=2, help="one-thread workers, and threads of the plain side (default 2)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    rows = measure(args)
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'fit':32} {'seconds':>8} {'x plain':>8} {'peak MiB':>9}")
    for row in rows:
        print(f"{row['fit']:32} {row['seconds']:8.2f} {row['times_plain']:8.2f} {row['peak_mib']:9}")
    print("Seconds are medians; peak memory is that of all the workers together, the driver not counted.")


if __name__ == "__main__":
    main()
