"""Predicted and measured peak memory of workers, over shapes of tables that the constants were not fitted to.

Each training is a job on a pool without Ray, as users have it. Run it with
``python -m tests.benchmarks.worker_memory``; with ``--write``, it measures the constants of
`shoal.training.sizing.constants` first.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import psutil

from shoal.jobs import parse_spec, submit
from shoal.training.boosting.library import library_of
from shoal.training.boosting.request import WorkerStats
from shoal.training.sizing import constants
from tests.benchmarks import peers
from tests.benchmarks.datasets import synthetic
from tests.benchmarks.peers import Library
from tests.benchmarks.report import table
from tests.benchmarks.side import Side

_ROUNDS = 4


@dataclass(frozen=True)
class Shape:
    """A table and the number of workers that train on it."""

    rows: int
    columns: int
    workers: int = 1

    def __str__(self) -> str:
        return f"{self.rows / 1000:,.0f} k x {self.columns:,}, {self.workers} worker(s)"


FITTED = Shape(4_000_000, 4)
"""Shape whose peak is nearly all rows: it gives the bytes per row."""

CHECKED = (
    Shape(3_000_000, 6),
    Shape(2_400_000, 8, 2),
    Shape(1_500_000, 16),
    Shape(2_000_000, 28, 4),
    Shape(600_000, 60),
    Shape(400_000, 80, 2),
    Shape(250_000, 120),
    Shape(120_000, 250),
    Shape(60_000, 400, 2),
    Shape(40_000, 600),
    Shape(16_000, 1_500, 4),
    Shape(14_000, 2_000),
)
"""Shapes to which no constant was fitted."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare predicted and measured peaks of workers.")
    parser.add_argument("--write", action="store_true", help="measure the constants first, and write them")
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(CHECKED)), help="numbers of shapes")
    args = parser.parse_args(argv)
    if args.write:
        write_constants()
    rows = [_row(library, CHECKED[number]) for number in args.shapes for library in get_args(Library)]
    head = ["library", "shape", "idle, MiB", "predicted, MiB", "measured, MiB", "predicted / measured"]
    print(table(head, rows))


def write_constants() -> None:
    """Measure the idle workers and the bytes per row, and write them into the module of the constants."""
    idle, score = dict(constants.IDLE_BYTES), dict(constants.SCORE_BYTES)
    for library in get_args(Library):
        worker = measured(library, FITTED)
        idle[library] = worker.idle_rss_bytes
        score[library] += round((worker.peak_rss_bytes - worker.predicted_bytes) / worker.rows)
    idle["pytorch"] = idle_pytorch()
    libraries = ", ".join(f"{name} {library_of(name).version()}" for name in get_args(Library))
    machine = f"{os.cpu_count()} CPUs with {psutil.virtual_memory().total >> 30} GiB"
    values = {
        "MEASURED": f'"{time.strftime("%Y-%m-%d")} on {machine}, Python {platform.python_version()}, {libraries}"',
        "IDLE_BYTES": "{" + ", ".join(f'"{name}": {round(size / 2**20)} * 2**20' for name, size in idle.items()) + "}",
        "SCORE_BYTES": "{" + ", ".join(f'"{name}": {size}' for name, size in score.items()) + "}",
    }
    file = Path(constants.__file__)
    text = file.read_text()
    for name, value in values.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    file.write_text(text)


def idle_pytorch() -> int:
    """Return the memory of a worker that has imported PyTorch and has read nothing."""
    spec = {"framework": "pytorch", "train_func": "os:getpid", "tracking": None, "run_config": {"pool_name": "bench"}}
    with peers.shoal_pool("xgboost", workers=1):
        return submit(parse_spec(spec)).wait(on_log=None).peak_memory_per_worker[0]


def measured(library: Library, shape: Shape) -> WorkerStats:
    """Train on a table of a shape, and return the figures of the worker with the highest peak."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        data = synthetic(Path(folder) / "data", str(shape), shape.rows, shape.columns, _ROUNDS)
        side = Side(peers.shoal_pool, library, shape.workers)
        try:
            workers: Sequence[WorkerStats] = side.ask(data).workers
        finally:
            side.close()
    return max(workers, key=lambda worker: worker.peak_rss_bytes)


def _row(library: Library, shape: Shape) -> list[str]:
    worker = measured(library, shape)
    figures = (worker.idle_rss_bytes, worker.predicted_bytes, worker.peak_rss_bytes)
    ratio = worker.predicted_bytes / worker.peak_rss_bytes
    return [library, str(shape), *(f"{size / 2**20:,.0f}" for size in figures), f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
