"""Scaling a local pool, with and without Ray, from one node to more, against `ray.cluster_utils.Cluster` adding as
many.

Every time is wall time from the request to the last node that is up; all heads run all the while, each in a process of
its own, and they take turns, so that a busy machine slows all. Ray's own test cluster starts its nodes one after
another in one process that has imported Ray already; a pool's nodes get a supervisor each, that outlives the caller.
The memory is that of all nodes when they are up, with each page counted once.

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

from tests.benchmarks.process_tree import tree_bytes
from tests.benchmarks.report import table
from tests.benchmarks.side import Side

# Before Ray is imported: without these it may listen beyond loopback and report home.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

_OBJECT_STORE_MB = 128
_MOST_NODES = 16


Grow = Callable[[int], tuple[float, int]]
"""To so many nodes, the head among them, and back; returns the seconds of growing, and the bytes of all nodes."""


@contextmanager
def cluster_utils(folder: Path) -> Iterator[Grow]:
    """A test cluster of Ray's own."""
    # The test cluster notes its address in this folder, which it does not make.
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir(parents=True)
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": _OBJECT_STORE_MB * 2**20, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args=common)

    def grow(size: int) -> tuple[float, int]:
        began = time.perf_counter()
        nodes = [cluster.add_node(**common) for _ in range(size - 1)]
        seconds, used = time.perf_counter() - began, tree_bytes(os.getpid())
        for node in nodes:
            cluster.remove_node(node)
        return seconds, used

    try:
        yield grow
    finally:
        cluster.shutdown()


@contextmanager
def shoal(folder: Path, ray: bool) -> Iterator[Grow]:
    """A pool, with or without Ray."""
    os.environ["SHOAL_HOME"] = str(folder)
    os.environ["TMPDIR"] = str(folder.parent)  # with turns of its own, beside other pools' of this machine
    tempfile.tempdir = None
    from shoal import ComputePool
    from tests.support.pool_processes import node_rows

    options = f"max_nodes={_MOST_NODES}&object_store_mb={_OBJECT_STORE_MB}&ray={str(ray).lower()}"
    pool = ComputePool(f"local://bench?{options}").up()

    def grow(size: int) -> tuple[float, int]:
        began = time.perf_counter()
        pool.scale(size)
        seconds = time.perf_counter() - began
        # Ray's agents have no variables to be found by, but descend from their node's supervisor.
        used = sum(tree_bytes(node.supervisor["pid"]) for node in node_rows() if node.supervisor)
        pool.scale(1)
        return seconds, used

    try:
        yield grow
    finally:
        pool.down()


def measure(nodes: int, repeat: int) -> list[list[tuple[float, int]]]:
    """Seconds and bytes of Ray's test cluster, of a pool, and of one without Ray, for each turn."""
    # Short, because Ray puts sockets (108 bytes at most) below it.
    folder = Path(tempfile.mkdtemp(prefix=""))
    try:
        sides = [Side(cluster_utils, folder / "c"), Side(shoal, folder / "s", True), Side(shoal, folder / "n", False)]
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
        base = 0.0
        names = ("ray.cluster_utils.Cluster", "shoal, a pool", "shoal, without Ray")
        for name, turns in zip(names, measure(nodes, args.repeat), strict=True):
            seconds, used = zip(*turns, strict=True)
            figures = [statistics.median(seconds), min(seconds), max(seconds)]
            base = base or figures[0]
            memory = f"{statistics.median(used) / 2**20:.0f}"
            row = [*(f"{figure:.2f}" for figure in figures), f"{figures[0] / base:.2f}", memory]
            rows.append([f"1 -> {nodes}, {name}", *row])
    print(table(["nodes", "median s", "min", "max", "x Ray", "MiB"], rows))


if __name__ == "__main__":
    main()
