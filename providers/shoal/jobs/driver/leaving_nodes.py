"""Report the nodes of the Ray cluster that will shut down soon, such as spot machines that the cloud takes back.

Ray names these nodes only to processes that are connected to the cluster, and not over HTTP. So the reconciler of a
`ray://` pool cannot ask Ray for them. Instead, the drivers of jobs record the shutdown in the rows of the nodes, and
the reconciler then requests a replacement before the node ends.
"""

from __future__ import annotations

import threading
import time

from shoal.jobs.timeouts import LEAVING_PERIOD_S
from shoal.pool.journal import commands
from shoal.pool.journal.rows import JournalStep, transaction
from shoal.state import Store
from shoal.training import cluster


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
        leaving = cluster.leaving_nodes() - self._reported
        if not leaving:
            return
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.note_leaving(session, self._pool, leaving, time.time())
        order, names = cluster.node_order(), cluster.node_names()
        for node_id in sorted(leaving):
            if order.get(node_id) == 0:
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
