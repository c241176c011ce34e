"""Find embedded pools (pools that belong to one process or job) that nobody needs any more."""

from __future__ import annotations

from shoal.pool.holder import job_of
from shoal.pool.snapshot import Snapshot
from shoal.state.process import ProcessId
from shoal.state.schema import PoolState


def is_abandoned(snapshot: Snapshot) -> bool:
    """Return whether a pool is up although nobody needs it any more: it is an embedded pool, the process that it
    belongs to has ended, and no job has a lease on it."""
    owner = snapshot.pool.owner
    if snapshot.pool.state is not PoolState.UP or owner is None:
        return False
    if any(job_of(lease.holder) is not None for lease in snapshot.leases):
        return False
    return ProcessId.from_json(owner).known_dead()
