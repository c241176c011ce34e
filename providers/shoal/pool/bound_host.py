"""The host to which a pool is bound: only that host can start and end the nodes of a local pool."""

from __future__ import annotations

from shoal.state.home import is_own_store
from shoal.state.process import host_id, hostname
from shoal.state.schema import Pool

ANYWHERE = ""
"""Value of a pool's `host` column if any host can start and end the pool's nodes, as for an existing Ray cluster."""


def is_here(pool: Pool) -> bool:
    """Return whether this machine can start and end a pool's nodes. It cannot in another store than its own."""
    return is_own_store() and (pool.host == ANYWHERE or pool.host_id == host_id())


def bind_here(pool: Pool) -> None:
    """Record in a pool's row that the pool is bound to this machine."""
    pool.host, pool.host_id = hostname(), host_id()


def is_bound_here(pool: Pool) -> bool:
    """Return whether a pool's row contains this machine's current hostname and host id. Also return True if the pool is
    bound to no host."""
    return pool.host == ANYWHERE or (pool.host, pool.host_id) == (hostname(), host_id())
