"""What is kept of nodes and operations that have ended, and for how long. A node's folder goes with the node."""

from __future__ import annotations

from contextlib import suppress

from shoal.pool.journal import rows
from shoal.pool.tunables import KEEP_LOGS, KEEP_OPERATIONS
from shoal.state import Store, home


def retain(store: Store, name: str, now: float) -> None:
    """Remove a pool's oldest operations and the logs of nodes that are long gone.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    with store.transaction() as session:
        nodes = {node.name for node in rows.load(session, name).nodes}
        rows.keep_newest_operations(session, name, KEEP_OPERATIONS)
    for log in (home() / "pools" / name / "logs").glob("*.log"):  # pools of others have none
        with suppress(FileNotFoundError):  # somebody else sweeps too
            if log.stem not in nodes and now - log.stat().st_mtime > KEEP_LOGS:
                log.unlink()
