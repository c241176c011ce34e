"""Delete old operations, old rows of the table `usage` (the number of nodes of each lease and job), and old logs of
ended nodes.

A node's folder is deleted when the node ends.
"""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import delete, select

from shoal.pool.journal import rows
from shoal.state import Store, home
from shoal.state.schema import Operation, OperationState, Usage

KEEP_OPERATIONS = 100
"""Number of ended operations that are kept for each pool. Every read of the pool loads all these operations, so a
larger number would make each read slower."""

KEEP_LOGS = 7 * 24 * 3600.0
"""Time for which the logs of ended nodes are kept: one week, so that logs of Friday can still be read on Monday."""

KEEP_USAGE = 400 * 24 * 3600.0
"""Time for which rows of the table `usage` are kept. A month can then be compared with the same month of last year."""

RETENTION_PERIOD = 3600.0
"""Interval at which the reconciler removes old logs and operations."""


def retain(store: Store, name: str, now: float) -> None:
    """Delete a pool's ended operations (except the newest) and the old logs of its ended nodes. Also delete old rows of
    the table `usage` (the number of nodes of each lease and job), for all pools.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    with store.transaction() as session:
        nodes = {node.name for node in rows.load(session, name).nodes}
        ended = select(Operation).where(Operation.pool == name, Operation.state != OperationState.OPEN)
        for operation in session.scalars(ended.order_by(Operation.created_at.desc()).offset(KEEP_OPERATIONS)):
            session.delete(operation)
        session.execute(delete(Usage).where(Usage.ended_at < now - KEEP_USAGE))
    # A ray:// pool has no log folder, so the loop finds no files. If another process deletes the same log at the same
    # time, the missing file is not an error.
    for log in (home() / "pools" / name / "logs").glob("*.log"):
        with suppress(FileNotFoundError):
            if log.stem not in nodes and now - log.stat().st_mtime > KEEP_LOGS:
                log.unlink()
