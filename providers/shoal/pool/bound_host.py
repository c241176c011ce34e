"""The host and the home that may act on a pool: only its own host can start and end the nodes of a local pool."""

from __future__ import annotations

from shoal.os_processes import host_id, hostname
from shoal.pool import recorded
from shoal.state.home import is_own_store
from shoal.state.schema import Pool

ANYWHERE = ""
"""Value of a pool's `host` column if any host can start and end the pool's nodes, as for an existing Ray cluster."""


def is_here(pool: Pool) -> bool:
    """Return whether this process can start and end a pool's nodes: this machine can, and the home has recorded the
    pool as its row is now (`shoal.pool.recorded`)."""
    return is_on_this_host(pool) and recorded.refusal(pool) is None


def is_on_this_host(pool: Pool) -> bool:
    """Return whether a pool is bound to this machine, or to none. A process is on no host of another store than its
    own."""
    return is_own_store() and (pool.host == ANYWHERE or pool.host_id == host_id())


def unrecorded(pool: Pool) -> str | None:
    """Return the reason why this home does nothing with a pool that this machine could use, and what to do; None if
    there is no such reason."""
    return recorded.refusal(pool) if is_on_this_host(pool) else None


def bind_here(pool: Pool) -> None:
    """Record in a pool's row that the pool is bound to this machine."""
    pool.host, pool.host_id = hostname(), host_id()


def is_bound_here(pool: Pool) -> bool:
    """Return whether a pool's row contains this machine's current hostname and host id. Also return True if the pool is
    bound to no host."""
    return pool.host == ANYWHERE or (pool.host, pool.host_id) == (hostname(), host_id())
