"""The supervisor of a node that is not on loopback.

``python -m tests.support.network_hosts_supervisor NODE_ID EPOCH ADDRESS``
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.pool import supervisor
from shoal.pool.spec import PoolSpec
from shoal.pool.supervisor import Member
from shoal.state.schema import Node


def start(node: Node, spec: PoolSpec, gcs: str | None, folder: Path) -> Member:
    """A Ray node on this host's address."""
    # Between hosts, a link may be cut: head and node give each other up after 20 s.
    os.environ.update(RAY_health_check_timeout_ms="3000")
    from shoal.pool.backends.local import raylet

    raylet.HEAD_PATIENCE = 15.0
    return raylet.Raylet(node, spec.model_copy(update={"ray_dashboard": True}), gcs, folder, ip=sys.argv[3])


if __name__ == "__main__":
    supervisor.ensure_running = lambda: None  # the reconciler is the orchestrating host's
    supervisor.main(lambda _: start)
