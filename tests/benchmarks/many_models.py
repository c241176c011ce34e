"""One model per partition: `shoal.many.train` against a plain loop in one process per core.

Run it with ``python -m tests.benchmarks.many_models [--partitions 10000]``. The goal is at most 1.3 times the seconds
of the plain loop, plus 15 s. Both read the same Parquet file, and keep the bytes of each model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from tests.benchmarks.report import table
from tests.support.homes import new_home

ROWS, COLUMNS, ROUNDS = 300, 8, 20

PLAIN = """
import pickle, sys
import pandas as pd, xgboost
path, number, cores, rounds, target = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
frame = pd.read_parquet(path)
columns = [name for name in frame.columns if name.startswith("x")]
models = {}
for key, rows in frame[frame["store"] % cores == number].groupby("store"):
    matrix = xgboost.DMatrix(rows[columns], rows["y"], nthread=1)
    params = {"objective": "reg:squarederror", "nthread": 1, "seed": 0}
    models[key] = bytes(xgboost.train(params, matrix, rounds).save_raw("ubj"))
with open(target, "wb") as file:
    pickle.dump(models, file)
"""
"""The plain loop of one process, for its share of the partitions."""


def write_table(path: Path, partitions: int) -> None:
    """Write a table whose partitions are mixed, as they are in a table that is sorted by time."""
    random = np.random.default_rng(0)
    rows = partitions * ROWS
    frame = pd.DataFrame(
        random.normal(size=(rows, COLUMNS)).astype("float32"), columns=[f"x{i}" for i in range(COLUMNS)]
    )
    frame["store"] = random.permutation(np.repeat(np.arange(partitions), ROWS))
    frame["y"] = frame["x0"] * (1 + frame["store"] % 7) + frame["x1"] + random.normal(size=rows) / 10
    frame.to_parquet(path, row_group_size=250_000)


def plain(path: Path, cores: int, folder: Path) -> tuple[float, dict[int, bytes]]:
    """The seconds and the models of the plain loop."""
    import pickle

    began = time.perf_counter()
    targets = [folder / f"models-{number}.pkl" for number in range(cores)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN, path, str(number), str(cores), str(ROUNDS), target], env=environment
        )
        for number, target in enumerate(targets)
    ]
    for process in processes:
        assert process.wait() == 0
    seconds = time.perf_counter() - began
    models: dict[int, bytes] = {}
    for target in targets:
        models |= pickle.loads(target.read_bytes())
    return seconds, models


def ours(path: Path) -> tuple[float, dict[int, str], int]:
    """The seconds, the digests of the models, and the largest peak memory of a worker, with a pool that starts."""
    from shoal import many
    from shoal.data import DataConnector
    from shoal.distributors.xgboost import XGBEstimator
    from shoal.jobs import list_jobs

    began = time.perf_counter()
    columns = [f"x{number}" for number in range(COLUMNS)]
    results = many.train(
        XGBEstimator(ROUNDS, "reg:squarederror"),
        DataConnector.from_parquet(path),
        by="store",
        input_cols=columns,
        label_col="y",
    )
    seconds = time.perf_counter() - began
    results.require_all()
    result = list_jobs()[0].result
    assert result is not None
    print(f"steps: {result.times}")
    digests = {each.key: hashlib.sha256(each.content()).hexdigest() for each in results}
    return seconds, digests, max(result.peak_memory_per_worker)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time a model per partition against a plain loop per core.")
    parser.add_argument("--partitions", type=int, default=10_000, help="number of partitions (default 10000)")
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, new_home():
        path = Path(folder) / "rows.parquet"
        write_table(path, args.partitions)
        alone, models = plain(path, cores, Path(folder))
        seconds, digests, peak = ours(path)
    assert digests == {key: hashlib.sha256(model).hexdigest() for key, model in models.items()}
    ratio = (seconds - 15) / alone
    rows = [
        ["plain loop per core", f"{alone:.1f}", f"{args.partitions / alone:.0f}", ""],
        ["shoal.many.train", f"{seconds:.1f}", f"{args.partitions / seconds:.0f}", f"{peak >> 20:,}"],
    ]
    head = [f"{args.partitions:,} models on {cores} cores", "seconds", "models/s", "MiB of the largest worker"]
    print(table(head, rows))
    print(f"ratio {seconds / alone:.2f}; without 15 s {ratio:.2f} (goal: at most 1.3); all models equal byte for byte")


if __name__ == "__main__":
    main()
