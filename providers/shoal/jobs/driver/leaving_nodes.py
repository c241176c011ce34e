"""Watch which nodes will shut down soon, and find the nodes of a local pool on which the driver itself starts workers.

Ray names the nodes that will shut down, such as spot machines that the cloud takes back, only to processes that are
connected to the cluster, and not over HTTP. So the reconciler of a `ray://` pool cannot ask Ray for them. Instead, the
drivers of jobs record the shutdown in the rows of the nodes, and the reconciler then requests a replacement before the
node ends.
"""

from __future__ import annotations

import contextlib
import threading
import time

import psutil
from sqlalchemy import select

from shoal.jobs.journal.steps import patiently
from shoal.jobs.timeouts import LEAVING_PERIOD_S
from shoal.os_processes import ProcessId
from shoal.pool.backends.local.gpus import SELECTORS
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.journal import commands
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.state import Store
from shoal.state.schema import Node
from shoal.training import cluster
from shoal.training.gang.local_node import NodeWithRay


class LeavingWatch:
    """Daemon thread that checks which nodes will shut down soon.

    Args:
        store: Store that has the rows of the nodes.
        pool: Name of the pool.
    """

    def __init__(self, store: Store, pool: str) -> None:
        self._store = store
        self._pool = pool
        self._reported: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-leaving", daemon=True)

    def start(self) -> None:
        """Start the thread. This process has to be connected to Ray."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present check of the nodes."""
        self._done.set()

    def look(self) -> None:
        """Print a line for each node that will shut down soon and was not reported before, and record the shutdown in
        the node's row.

        Raises:
            ShoalError: The row cannot be written.
        """
        if not (leaving := cluster.leaving_nodes() - self._reported):
            return
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.note_leaving(session, self._pool, leaving, time.time())
        names = cluster.node_names()
        for node_id in sorted(leaving):
            if node_id == next(iter(names), None):
                print(
                    "the pool's head will shut down soon: this job will end together with the head, and a retry will "
                    "start the job again",
                    flush=True,
                )
            else:
                print(f"node {names.get(node_id, node_id)} will shut down soon", flush=True)
        self._reported |= leaving

    def _run(self) -> None:
        while not self._done.wait(LEAVING_PERIOD_S):
            try:
                self.look()
            except Exception as error:  # the store or Ray may not answer now; the next check tries again
                print(f"the coming shutdown of a node could not be recorded: {error}", flush=True)


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
        rows = store.rows(with_supervisors)
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
