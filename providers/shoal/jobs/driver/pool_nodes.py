"""Find the nodes of a local pool with Ray, on which the driver of a training starts the workers itself."""

from __future__ import annotations

import contextlib

import psutil
from sqlalchemy import select

from shoal.jobs.journal.store_outages import patiently
from shoal.os_processes import ProcessId
from shoal.pool.backends.local.gpus import SELECTORS
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.state import Store
from shoal.state.schema import Node
from shoal.training.gang.local_node import NodeWithRay

_FOLDER = "TMPDIR"

_OF_A_NODE = (NODE_TAG, _FOLDER, *SELECTORS)
"""Environment variables that differ between the nodes of a pool. The driver has those of the head."""


def find(store: Store, pool: str, gcs: str) -> dict[str, NodeWithRay]:
    """Return the nodes of a pool whose raylets are children of supervisors on this machine, by name.

    Args:
        store: Store that has the rows of the nodes.
        pool: Name of the pool.
        gcs: Address to which user code in the workers connects if it uses Ray.
    """
    with_supervisors = select(Node.name, Node.supervisor).where(Node.pool == pool)

    def read() -> list[tuple[str, ProcessId]]:
        with store.reading(snapshot=False) as session:
            rows = session.execute(with_supervisors).all()
        return [(name, ProcessId.from_json(supervisor)) for name, supervisor in rows if supervisor]

    running = ((name, _raylet_of(supervisor)) for name, supervisor in patiently(store, read) if supervisor.alive())
    return {
        name: NodeWithRay(environment[_FOLDER], pid, {**environment, "RAY_ADDRESS": gcs})
        for name, (pid, environment) in running
        if pid
    }


def _raylet_of(supervisor: ProcessId) -> tuple[int, dict[str, str]]:
    """Return the process id of a node's raylet, and those of its environment variables that are the node's own. The
    process id is 0 if the node has ended, or has not started yet."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(supervisor.pid).children():
            if child.name() == "raylet":
                # Ray's own workers inherit the environment of the raylet, too.
                environment = child.environ()
                return child.pid, {name: environment[name] for name in _OF_A_NODE if name in environment}
    return 0, {}
