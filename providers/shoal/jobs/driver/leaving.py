"""Tell the user and the pool that a node of the Ray cluster has announced its end.

Ray reports announced ends only to processes that are connected to the cluster, and not over HTTP. So the reconciler of
a `ray://` pool does not see the announcements, and the drivers of jobs write them into the rows of the nodes. The
reconciler then requests a replacement before the node goes.
"""

from __future__ import annotations

import threading
import time

from shoal.jobs.tunables import LEAVING_PERIOD_S
from shoal.pool.journal import commands
from shoal.pool.journal.steps import JournalStep, transaction
from shoal.state import Store
from shoal.training import cluster


class LeavingWatch:
    """Thread that looks for nodes that have announced their end. The process can end while the thread runs.

    Args:
        store: Store that has the rows of the nodes.
        pool: Name of the pool.
    """

    def __init__(self, store: Store, pool: str) -> None:
        self._store = store
        self._pool = pool
        self._told: set[str] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-leaving", daemon=True)

    def start(self) -> None:
        """Start the thread. This process has to be connected to Ray."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its present check of the nodes."""
        self._done.set()

    def look(self) -> None:
        """Print a line for each node that has announced its end since the last look, and write the end into its row.

        Raises:
            ShoalError: The row cannot be written.
        """
        leaving = cluster.leaving_nodes() - self._told
        if not leaving:
            return
        with transaction(self._store, JournalStep.REQUEST) as session:
            commands.note_leaving(session, self._pool, leaving, time.time())
        order, names = cluster.node_order(), cluster.node_names()
        for node_id in sorted(leaving):
            if order.get(node_id) == 0:
                print(
                    "the pool's head has announced its end: this job ends with it, and a retry begins anew", flush=True
                )
            else:
                print(f"node {names.get(node_id, node_id)} has announced its end", flush=True)
        self._told |= leaving

    def _run(self) -> None:
        while not self._done.wait(LEAVING_PERIOD_S):
            try:
                self.look()
            except Exception as error:  # the store or Ray may not answer now; the next check tries again
                print(f"the announced end of a node could not be recorded: {error}", flush=True)
