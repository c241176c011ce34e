"""The supervisor of a node that is not on loopback.

``python -m tests.support.network_hosts_supervisor NODE_ID EPOCH ADDRESS``
"""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.pool import supervisor
from shoal.pool.backends.local.node_start import Member
from shoal.pool.spec import PoolSpec
from shoal.state.schema import Node


def start(node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> Member:
    """A Ray node on this host's address."""
    from shoal.pool.backends.local.raylet import Raylet, RayletSpec

    store_bytes = spec.object_store_mb * 2**20
    size = node.cpus, node.gpus, store_bytes
    return Raylet(RayletSpec(node.name, folder, *size, gcs, dashboard=True, ip=sys.argv[3]))


if __name__ == "__main__":
    supervisor.ensure_running = lambda: None  # the reconciler is the orchestrating host's
    supervisor.main(lambda _: start)
