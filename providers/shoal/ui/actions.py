"""Functions behind the buttons of the web page: release a lease, sweep, cancel a job, and change a pool's limits.

Each function calls the same public function as the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from shoal import jobs
from shoal.errors import InvalidArgumentError
from shoal.history import Entry, acting_as, read
from shoal.pool.api import ComputePool
from shoal.state import Store

_MOST_SEARCHED = 500
"""Number of lines about a pool, in the record of actions, that are searched for the lines about one job."""


def recorded(store: Store, *, limit: int, pool: str | None = None, job_id: str | None = None) -> list[Entry]:
    """Return the newest lines of the record of actions.

    Args:
        store: The state store.
        limit: Greatest number of lines.
        pool: Only actions on this pool and its jobs.
        job_id: Only actions on this job, among the newest 500 lines about its pool.
    """
    if job_id is None:
        return read(pool=pool, limit=limit, store=store)
    return [line for line in read(pool=pool, limit=_MOST_SEARCHED, store=store) if line.subject == job_id][:limit]


def release(store: Store, actor: str, *, pool: str, lease_id: str) -> str:
    """Release a lease of a pool, and return a sentence about the result.

    Raises:
        InvalidArgumentError: The lease was already released, or has expired.
    """
    held = {lease.id: lease for lease in ComputePool(pool, store=store).describe().leases}
    if lease_id not in held:
        raise InvalidArgumentError(f'this lease of pool "{pool}" was released or has expired: nothing was changed')
    holder = held[lease_id].holder
    with acting_as(actor):
        released = ComputePool(pool, holder=holder, store=store).release()
    return f"the lease of {holder} was released" if released else f"{holder} had no lease any more"


def sweep(store: Store, actor: str) -> str:
    """End nodes that no pool needs, record the end of lost jobs, and return a text about what was done."""
    with acting_as(actor):
        did = jobs.sweep(store)
    return "; ".join(did) or "nothing to sweep"


def cancel(store: Store, actor: str, *, job_id: str, attempt: int) -> str:
    """Cancel an attempt of a job, and return a sentence about the result."""
    with acting_as(actor):
        handle = jobs.attach(job_id, attempt, store=store)
        cancelled = handle.cancel(f"cancelled by {actor} on shoal's page")
    done = f"job {job_id} was cancelled" if cancelled else f"job {job_id} had already ended"
    return f"{done}; {handle.left}" if handle.left else done


def alter(store: Store, actor: str, *, pool: str, min_nodes: int, max_nodes: int) -> str:
    """Change a pool's smallest and largest number of nodes, and return a sentence about the result."""
    with acting_as(actor):
        ComputePool(pool, store=store).alter(min_nodes=min_nodes, max_nodes=max_nodes)
    return f"pool {pool} now has {min_nodes} to {max_nodes} nodes"


def perform(store: Store, actor: str, name: str, arguments: dict[str, Any]) -> str:
    """Carry out the action that a request of the web page names.

    Args:
        store: The state store.
        actor: Name of the user.
        name: Name of the action: ``release``, ``sweep``, ``cancel`` or ``alter``.
        arguments: Arguments of the action, as the request contains them.

    Returns:
        A sentence about what was done.

    Raises:
        InvalidArgumentError: An argument is missing, unknown, or of a wrong type.
        ShoalError: The action failed.
    """
    action = _ACTIONS[name]
    parameters = signature(action, eval_str=True).parameters.values()
    wanted = {each.name: each.annotation for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
    given = {key: type(value) for key, value in arguments.items()}
    if given != wanted:
        needed = ", ".join(f"{key} ({kind.__name__})" for key, kind in wanted.items()) or "no argument"
        raise InvalidArgumentError(f"the action {name} needs {needed}")
    return action(store, actor, **arguments)


_ACTIONS: dict[str, Callable[..., str]] = {"release": release, "sweep": sweep, "cancel": cancel, "alter": alter}
"""The function that carries out each action, by name of the action. The function's keyword-only arguments come from the
request."""

NAMES = frozenset(_ACTIONS)
