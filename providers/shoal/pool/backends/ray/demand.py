"""What is run *on* a foreign cluster, as a Ray job: tell its autoscaler how many nodes are wanted, or look for one.

``python -c <this file> JSON``; it needs nothing but the cluster's own Ray, and its last line is the answer, as JSON.

`request_resources` is one hint for the whole cluster, and the last to write it wins. So what each pool wants lies in
Ray's key-value store beside it, stamped with the time it was decided at: a job that was held up between decision and
hint finds the newer one and repeats that, and several pools on one cluster do not undo each other: the largest wins.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_PREFIX = "shoal-demand"
ASKING = "asking"
"""Printed before anything is asked: a job that died without it has asked for nothing."""

_HEAD = "node:__internal_head__"
READ_ONLY = "node_"  # Ray's monitor runs on static clusters too, and names each node's type so


def autoscaler() -> str | None:
    """``v1`` or ``v2``; None on a static cluster."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):
        reply = GetClusterStatusReply()
        reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status())
        # One reports, and whoever launched the head gave it a type: a read-only monitor reports on nodes without.
        typed = any(node.ray_node_type_name for node in reply.cluster_resource_state.node_states)
        return "v2" if reply.autoscaling_state.autoscaler_state_version and typed else None
    report = json.loads(_internal_kv_get("__autoscaling_status") or b"{}").get("autoscaler_report") or {}
    types = (report.get("node_type_mapping") or {}).values()
    return "v1" if any(not kind.startswith(READ_ONLY) for kind in types) else None


def write(pool: str, stamp: float, size: int, cpus: int, gpus: int) -> None:
    """Note what a pool wants, and forget what it wanted before."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list, _internal_kv_put

    mine = f"{_PREFIX}/{pool}/"
    _internal_kv_put(f"{mine}{stamp:020.6f}/{size}/{cpus}/{gpus}", b"", overwrite=True)
    for key in sorted(_internal_kv_list(mine))[:-1]:
        _internal_kv_del(key)  # a pool that wants nothing keeps its newest, as the answer to a late older one


def read() -> tuple[int, int, int]:
    """What is wanted most: nodes, and the CPUs and GPUs of each."""
    from ray.experimental.internal_kv import _internal_kv_list

    newest: dict[str, tuple[int, int, int]] = {}
    for key in sorted(_internal_kv_list(f"{_PREFIX}/")):
        _, pool, _, size, cpus, gpus = key.decode().split("/")
        newest[pool] = (int(size), int(cpus), int(gpus))
    return max(newest.values(), default=(0, 0, 0))


def bundles(version: str, size: int, cpus: int, gpus: int) -> list[dict[str, float]]:
    """One bundle a node, the head among them.

    Version 2 would put all on workers and hold one more than is wanted: the head's own bundle fills it and fits nowhere
    else. Version 1 knows no such resource; it fills what is there first, the head included where a bundle fits it.
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
    """Carry an order out: ``gcs`` (or None), and unless only asked for the autoscaler, what `write` takes."""
    import ray

    ray.init(address=order["gcs"] or "auto", log_to_driver=False, logging_level="ERROR")
    kind = autoscaler()
    if kind is None or "pool" not in order:
        return {"autoscaler": kind}
    from ray.autoscaler.sdk import request_resources

    print(ASKING, flush=True)
    write(order["pool"], order["stamp"], order["size"], order["cpus"], order["gpus"])
    while True:  # until nobody wrote in between: whoever asks last has read last
        wanted = read()
        request_resources(bundles=bundles(kind, *wanted))
        if read() == wanted:
            return {"autoscaler": kind, "asked": wanted[0]}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
