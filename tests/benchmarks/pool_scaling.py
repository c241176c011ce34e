"""Scaling a local pool from one node to more, against `ray.cluster_utils.Cluster` adding as many.

Every figure is wall time from the request to the last node that is up; both heads run all the while, each in a process
of its own, and the two take turns, so that a busy machine slows both. Ray's own test cluster starts its nodes one after
another in one process that has imported Ray already; a pool's nodes get a supervisor each, that outlives the caller.

Run it with ``python -m tests.benchmarks.pool_scaling``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.report import table
from tests.benchmarks.side import Side

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

_OBJECT_STORE_MB = 128
_MOST_NODES = 16


Grow = Callable[[int], float]
"""To so many nodes, the head among them, and back; returns the seconds of growing."""


@contextmanager
def cluster_utils(folder: Path) -> Iterator[Grow]:
    """A test cluster of Ray's own."""
    # The test cluster notes its address in this folder, which it does not make.
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir(parents=True)
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": _OBJECT_STORE_MB * 2**20, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args=common)

    def grow(size: int) -> float:
        began = time.perf_counter()
        nodes = [cluster.add_node(**common) for _ in range(size - 1)]
        seconds = time.perf_counter() - began
        for node in nodes:
            cluster.remove_node(node)
        return seconds

    try:
        yield grow
    finally:
        cluster.shutdown()


@contextmanager
def shoal(folder: Path) -> Iterator[Grow]:
    """A pool."""
    os.environ["SHOAL_HOME"] = str(folder)
    os.environ["TMPDIR"] = str(folder.parent)  # with turns of its own, beside other pools' of this machine
    tempfile.tempdir = None
    from shoal import ComputePool

    pool = ComputePool(f"local://bench?max_nodes={_MOST_NODES}&object_store_mb={_OBJECT_STORE_MB}").up()

    def grow(size: int) -> float:
        began = time.perf_counter()
        pool.scale(size)
        seconds = time.perf_counter() - began
        pool.scale(1)
        return seconds

    try:
        yield grow
    finally:
        pool.down()


def measure(nodes: int, repeat: int) -> list[list[float]]:
    """Seconds of Ray's test cluster, and of a pool, for each turn."""
    # Short, because Ray puts sockets (108 bytes at most) below it.
    folder = Path(tempfile.mkdtemp(prefix=""))
    try:
        sides = [Side(opened, folder / opened.__name__[0]) for opened in (cluster_utils, shoal)]
        try:
            turns = [[side.ask(nodes) for side in sides] for _ in range(repeat)]
        finally:
            for side in sides:
                side.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [list(column) for column in zip(*turns, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time scaling 1 -> N against Ray's own test cluster adding nodes.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4], help="sizes to grow to, with the head (default 4)")
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    args = parser.parse_args(argv)
    rows = []
    for nodes in args.nodes:
        ray, pool = measure(nodes, args.repeat)
        for name, seconds in (("ray.cluster_utils.Cluster", ray), ("shoal, a pool", pool)):
            figures = [statistics.median(seconds), min(seconds), max(seconds)]
            ratio = figures[0] / statistics.median(ray)
            rows.append([f"1 -> {nodes}, {name}", *(f"{figure:.2f}" for figure in figures), f"{ratio:.2f}"])
    print(table(["nodes", "median s", "min", "max", "x Ray"], rows))


if __name__ == "__main__":
    main()
