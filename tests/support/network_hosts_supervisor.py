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
    from shoal.pool.backends.local.raylet import Raylet

    return Raylet(node, spec.model_copy(update={"ray_dashboard": True}), gcs, folder, ip=sys.argv[3])


if __name__ == "__main__":
    supervisor.ensure_running = lambda: None  # the reconciler is the orchestrating host's
    supervisor.main(lambda _: start)
