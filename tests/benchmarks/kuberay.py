"""A pool of 100 nodes on a real control plane: scaling against KubeRay's operator alone, and the requests while idle.

Both have a RayCluster of their own, with nodes that start fast (`tests/kuberay/light_ray.py`), and take turns. For the
operator alone, one patch sets the replicas, and the time ends when as many pods are ready or left. A pool's time ends
when its nodes have joined Ray, too. The requests and received bytes are those of one process that reconciles the pool
each second while it needs nothing.

It needs the programs of ``make test-kuberay``. Run it with ``python -m tests.benchmarks.kuberay``.
"""

from __future__ import annotations

import argparse
import os
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.benchmarks.report import table
from tests.kuberay.control_plane import LIGHT_IMAGE, ControlPlane, control_plane
from tests.kuberay.manifests import ray_cluster
from tests.support.waiting import wait_until

_PATH = "/apis/ray.io/v1/namespaces/default/rayclusters"
_PODS = "/api/v1/namespaces/default/pods?labelSelector=ray.io/cluster%3D"
_HOSTS, _MOST_NODES = 6, 100


def create(plane: ControlPlane, name: str) -> None:
    """Create a RayCluster without workers, and wait for its head."""
    body = ray_cluster(name, LIGHT_IMAGE, workers=0)
    body["spec"]["workerGroupSpecs"][0]["maxReplicas"] = _MOST_NODES
    for group in (body["spec"]["headGroupSpec"], *body["spec"]["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        container["resources"] = {"requests": {"cpu": "100m", "memory": "64Mi"}}
    plane.request("POST", _PATH, body)
    wait_until(lambda: ready(plane, name) == 1, f"the head of {name}", seconds=60)


def ready(plane: ControlPlane, name: str) -> int:
    """The number of pods that are ready; -1 as long as pods end."""
    pods = plane.request("GET", _PODS + name)["items"]
    if any(pod["metadata"].get("deletionTimestamp") for pod in pods):
        return -1
    conditions = [each for pod in pods for each in pod["status"].get("conditions", ())]
    return sum(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def operator_alone(plane: ControlPlane) -> Callable[[int], float]:
    create(plane, "alone")

    def scale(size: int) -> float:
        began = time.perf_counter()
        change = [{"op": "replace", "path": "/spec/workerGroupSpecs/0/replicas", "value": size - 1}]
        plane.request("PATCH", f"{_PATH}/alone", change, "application/json-patch+json")
        wait_until(lambda: ready(plane, "alone") == size, f"{size} pods", seconds=300, every=0.2)
        return time.perf_counter() - began

    return scale


def a_pool(plane: ControlPlane) -> Callable[[int], float]:
    from shoal import ComputePool

    create(plane, "pool")
    uri = f"kuberay://default/pool?max_nodes={_MOST_NODES}&kubeconfig={plane.kubeconfig}"
    pool = ComputePool(uri).up()

    def scale(size: int) -> float:
        began = time.perf_counter()
        pool.scale(size, options={"rollback_after_seconds": 600})
        return time.perf_counter() - began

    return scale


def idle(seconds: float) -> tuple[float, float]:
    """Requests and bytes a second of a process that reconciles the pool, which needs nothing."""
    from shoal.pool.reconciling import reconcile
    from shoal.state import Store

    counts = [0.0, 0.0]
    asked, received = HTTPConnection.putrequest, ssl.SSLSocket.recv_into

    def putrequest(connection: HTTPConnection, *args: Any, **options: Any) -> None:
        counts[0] += 1
        asked(connection, *args, **options)

    def recv_into(self: ssl.SSLSocket, *args: Any) -> int:
        size = received(self, *args)
        counts[1] += size
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HTTPConnection, "putrequest", putrequest)
        patch.setattr(ssl.SSLSocket, "recv_into", recv_into)
        for _ in range(30):  # until the pool is watched
            reconcile(Store(), "pool")
            time.sleep(1)
        counts[:] = 0.0, 0.0
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            reconcile(Store(), "pool")
            time.sleep(1)
    return counts[0] / seconds, counts[1] / seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Scale a pool of 100 nodes on Kubernetes, and count its requests.")
    parser.add_argument("--repeat", type=int, default=3, help="turns, of which the median counts (default 3)")
    parser.add_argument("--idle", type=float, default=240, help="seconds in which requests are counted (default 240)")
    args = parser.parse_args(argv)
    os.environ["SHOAL_HOME"] = tempfile.mkdtemp(prefix="shoal-bench-")
    sizes = [_MOST_NODES, 10, _MOST_NODES, 1]
    with control_plane(nodes=0) as plane:
        for number in range(_HOSTS):
            plane.add_node(f"node-{number}", cpu="60", memory="120Gi", pods=40)
        sides = [operator_alone(plane), a_pool(plane)]
        turns = [[[side(size) for size in sizes] for side in sides] for _ in range(args.repeat)]
        sides[1](_MOST_NODES)
        rate, size = idle(args.idle)
        from shoal import ComputePool

        ComputePool("pool").down()
    rows = []
    for number, (old, new) in enumerate(zip([1, *sizes], sizes, strict=False)):
        alone, pool = (statistics.median(turn[side][number] for turn in turns) for side in (0, 1))
        rows.append([f"{old} -> {new}", f"{alone:.1f}", f"{pool:.1f}", f"{pool / alone:.2f}"])
    print(table(["nodes", "operator alone, s", "shoal, s", "x operator"], rows), end="\n\n")
    print(table(["idle pool", "requests/s", "KiB/s"], [["100 nodes", f"{rate:.2f}", f"{size / 1024:.1f}"]]))


if __name__ == "__main__":
    main()
