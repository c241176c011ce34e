"""Scaling a local pool from one node to more, against `ray.cluster_utils.Cluster` adding as many.

Every figure is wall time from the request to the last node that is up; both heads run all the while, each in a process
of its own, and the two take turns, so that a busy machine slows both. Ray's own test cluster starts its nodes one after
another in one process that has imported Ray already; a pool's nodes get a supervisor each, that outlives the caller.

Run it with ``python -m tests.benchmarks.pool_scaling``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
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

_OBJECT_STORE_MB = 128


def serve_ray(pipe: Connection, folder: Path, args: argparse.Namespace) -> None:
    """Grows and shrinks a test cluster of Ray's own, once per request."""
    # The test cluster notes its address in this folder, which it does not make.
    os.environ["RAY_TMPDIR"] = str(folder)
    (folder / "ray").mkdir(parents=True)
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": _OBJECT_STORE_MB * 2**20, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args=common)
    pipe.send("up")
    try:
        while pipe.recv():
            began = time.perf_counter()
            nodes = [cluster.add_node(**common) for _ in range(args.nodes - 1)]
            pipe.send(time.perf_counter() - began)
            for node in nodes:
                cluster.remove_node(node)
            pipe.send("shrunk")
    finally:
        cluster.shutdown()


def serve_shoal(pipe: Connection, folder: Path, args: argparse.Namespace) -> None:
    """Grows and shrinks a pool, once per request."""
    os.environ["SHOAL_HOME"] = str(folder)
    os.environ["SHOAL_RUNTIME_ROOT"] = str(folder / "n")  # with a turn of its own, beside other pools' of this machine
    from shoal import ComputePool

    pool = ComputePool(f"local://bench?max_nodes={args.nodes}&object_store_mb={_OBJECT_STORE_MB}").up()
    pipe.send("up")
    try:
        while pipe.recv():
            began = time.perf_counter()
            pool.scale(args.nodes)
            pipe.send(time.perf_counter() - began)
            pool.scale(1)
            pipe.send("shrunk")
    finally:
        pool.down()


class Side:
    """One of the peers, in a process of its own, up with its head alone."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *args))
        self._process.start()
        theirs.close()
        self._pipe.recv()

    def grow(self) -> float:
        """Seconds; returns when it is back at its head."""
        self._pipe.send(True)
        seconds = self._pipe.recv()
        self._pipe.recv()
        return seconds

    def close(self) -> None:
        """End it, and see it gone."""
        self._pipe.send(False)
        self._process.join()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians and ranges of both sides."""
    # Short, because Ray puts sockets (108 bytes at most) below it.
    folder = Path(tempfile.mkdtemp(prefix="sb-"))
    try:
        sides = [Side(serve, folder / name, args) for name, serve in (("r", serve_ray), ("s", serve_shoal))]
        try:
            turns = [[side.grow() for side in sides] for _ in range(args.repeat)]
        finally:
            for side in sides:
                side.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ray, shoal = ([round(seconds, 2) for seconds in column] for column in zip(*turns, strict=True))
    return {"nodes": args.nodes, "ray": ray, "shoal": shoal,
            "ratio": round(statistics.median(shoal) / statistics.median(ray), 2)}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time scaling 1 -> N against Ray's own test cluster adding nodes.")
    parser.add_argument("--nodes", type=int, default=4, help="size to grow to, the head among them (default 4)")
    parser.add_argument("--repeat", type=int, default=5, help="turns, of which the median counts (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{f'1 -> {args.nodes} nodes':32} {'median s':>9} {'min':>6} {'max':>6}")
    for name, key in (("ray.cluster_utils.Cluster", "ray"), ("shoal, a pool", "shoal")):
        seconds = result[key]
        print(f"{name:32} {statistics.median(seconds):9.2f} {min(seconds):6.2f} {max(seconds):6.2f}")
    print(f"ratio of the medians: {result['ratio']:.2f} (aim: at most 1.5), {args.repeat} turns each")


if __name__ == "__main__":
    main()
