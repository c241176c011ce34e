"""Script that runs as a Ray job on an existing cluster. The script requests nodes from the cluster's autoscaler, or
checks whether the cluster has an autoscaler.

Usage: ``python -c <this file> JSON``. The script needs no package except the cluster's Ray. The last line that it
prints is the answer, as JSON.

Ray's function `request_resources` sets one request for the whole cluster, and each call overwrites the last one. So the
script also writes each pool's demand to Ray's key-value store, with the time of the decision, and requests the largest
demand of all pools. A job that was delayed after its decision then finds the newer demand, and several pools on one
cluster do not overwrite each other's requests.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_PREFIX = "shoal-demand"
ASKING = "asking"
"""Line that the script prints before it requests nodes. A job that died before this line has requested nothing."""

_HEAD = "node:__internal_head__"
# Prefix of the node types that Ray's monitor reports on a cluster without an autoscaler.
READ_ONLY = "node_"


def autoscaler() -> str | None:
    """Return the autoscaler's version, ``v1`` or ``v2``, or None if the cluster has no autoscaler."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):
        reply = GetClusterStatusReply()
        reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status())
        # A cluster has an autoscaler if the reply contains a state version and a node with a type. Without an
        # autoscaler, the nodes in the reply have no type.
        typed = any(node.ray_node_type_name for node in reply.cluster_resource_state.node_states)
        return "v2" if reply.autoscaling_state.autoscaler_state_version and typed else None
    report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
    types = (report.get("node_type_mapping") or {}).values()
    return "v1" if any(not kind.startswith(READ_ONLY) for kind in types) else None


def write(pool: str, stamp: float, size: int, cpus: int, gpus: int) -> None:
    """Write a pool's demand (the number and size of its nodes) to Ray's key-value store, and delete the pool's older
    demands."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list, _internal_kv_put

    mine = f"{_PREFIX}/{pool}/"
    _internal_kv_put(f"{mine}{stamp:020.6f}/{size}/{cpus}/{gpus}", b"", overwrite=True)
    for key in sorted(_internal_kv_list(mine))[:-1]:
        # The newest demand is kept even if its size is 0. If this demand were deleted, a delayed job would consider its
        # own older demand the newest, and would request nodes that the pool no longer needs.
        _internal_kv_del(key)


def read() -> tuple[int, int, int]:
    """Return the demand of the pool that requests the most nodes, as a tuple: number of nodes, CPUs per node, GPUs per
    node."""
    from ray.experimental.internal_kv import _internal_kv_list

    newest: dict[str, tuple[int, int, int]] = {}
    for key in sorted(_internal_kv_list(f"{_PREFIX}/")):
        _, pool, _, size, cpus, gpus = key.decode().split("/")
        newest[pool] = (int(size), int(cpus), int(gpus))
    return max(newest.values(), default=(0, 0, 0))


def bundles(version: str, size: int, cpus: int, gpus: int) -> list[dict[str, float]]:
    """Build the resource bundles to request from the autoscaler: one bundle for each requested node.

    Autoscaler v2 would place all bundles on workers and keep one node too many. So one bundle fills the head and fits
    on no other node. Autoscaler v1 does not know the head's resource. It fills existing nodes first, including the
    head. So the head gets no bundle of its own if a worker's bundle is too large for the head.
    """
    import ray

    if size <= 1:
        return []
    head = next(node["Resources"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"])
    worker: dict[str, float] = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    if version == "v2":
        filled = {name: head[name] for name in ("CPU", "GPU") if head.get(name)}
        return [{_HEAD: 0.001, **filled}, *[worker] * (size - 1)]
    fits = all(head.get(name, 0) >= amount for name, amount in worker.items())
    return [worker] * (size if fits else size - 1)


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Request nodes from the cluster's autoscaler, or only check whether the cluster has an autoscaler."""
    import ray

    os.chdir("/")  # Ray's workers import first from this folder, to which only root can write
    ray.init(address=order["gcs"] or "auto", log_to_driver=False, logging_level="ERROR")
    kind = autoscaler()
    if kind is None or "pool" not in order:
        return {"autoscaler": kind}
    from ray.autoscaler.sdk import request_resources

    print(ASKING, flush=True)
    write(order["pool"], order["stamp"], order["size"], order["cpus"], order["gpus"])
    # Another job may write a demand after this job has read the demands. In this case the loop repeats, so that the
    # last request contains the newest demands.
    while True:
        wanted = read()
        request_resources(bundles=bundles(kind, *wanted))
        if read() == wanted:
            return {"autoscaler": kind, "asked": wanted[0]}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
