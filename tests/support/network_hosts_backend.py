"""The local backend with each node on a host of its own: same supervisor, rows and journal, other addresses.

``python -m tests.support.network_hosts_backend`` is the detached reconciler of its pools.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shoal.pool import reconciling
from shoal.pool.backends.interface import NodeRef, PoolRef
from shoal.pool.backends.local import processes
from shoal.pool.backends.local.backend import LocalBackend, inherited_environment, log_path, node_environment
from shoal.pool.options.local import LocalOptions
from shoal.reconciler import LostJobs
from shoal.state import home
from shoal.state.home import subfolder
from tests.support.network_hosts import Host


class HostsBackend(LocalBackend):
    """Runs each node's supervisor inside a host, the nodes by their number."""

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        ip = shutil.which("ip")
        assert ip is not None
        for node in nodes:
            host = host_of(node.name)
            supervisor = [
                sys.executable,
                "-m",
                "tests.support.network_hosts_supervisor",
                node.id,
                str(node.epoch),
                host.address,
            ]
            processes.spawn_detached(
                [ip, "netns", "exec", host.namespace, *supervisor],  # becomes the supervisor: one process, one pid
                env=node_environment(node),
                log=log_path(node.pool, node.name),
            )


def use(hosts: Sequence[Host]) -> None:
    """Have the nodes of this home run on these hosts."""
    _list().write_text(json.dumps([asdict(host) for host in hosts]))


def host_of(name: str) -> Host:
    """Where a node runs."""
    hosts = json.loads(_list().read_text())
    return Host(**hosts[int(name.rpartition("-")[2]) % len(hosts)])


def ensure_running() -> None:
    """Start the reconciler; a second one goes away again by itself."""
    processes.spawn_detached(
        [sys.executable, "-m", __name__], env=inherited_environment(), log=subfolder("logs") / "reconciler.log"
    )


def _list() -> Path:
    return home() / "hosts.json"  # the reconciler gets no more of its starter's environment than any


if __name__ == "__main__":
    LocalOptions.backend_class = f"{__name__}:HostsBackend"
    os.chdir("/")
    reconciling.run(watch=LostJobs().look)
