"""Functions behind the buttons of the web page: release a lease, sweep the host, cancel a job, and change a pool's
limits.

Each function calls the same public function as the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from shoal import jobs
from shoal.errors import InvalidArgumentError
from shoal.history import acting_as
from shoal.pool.api import ComputePool
from shoal.state import Store


def release(store: Store, actor: str, *, pool: str, lease_id: str) -> str:
    """Release a lease of a pool, and return a sentence about the result.

    Raises:
        InvalidArgumentError: The lease was already released, or has expired.
    """
    held = {lease.id: lease for lease in ComputePool(pool, store=store).describe().leases}
    if lease_id not in held:
        raise InvalidArgumentError(
            f'the lease of pool "{pool}" was already released or has expired, so nothing was changed: reload the page'
        )
    holder = held[lease_id].holder
    with acting_as(actor):
        released = ComputePool(pool, holder=holder, store=store).release()
    return f"the lease of {holder} was released" if released else f"{holder} had no lease any more"


def sweep(store: Store, actor: str) -> str:
    """End nodes that no pool needs, record the end of lost jobs, and return a text that lists these actions."""
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
    """Change a pool's minimum and maximum number of nodes, and return a sentence about the result."""
    with acting_as(actor):
        ComputePool(pool, store=store).alter(min_nodes=min_nodes, max_nodes=max_nodes)
    return f"pool {pool} now has {min_nodes} to {max_nodes} nodes"


def perform(store: Store, actor: str, name: str, arguments: dict[str, Any]) -> str:
    """Carry out the action that a request of the web page names.

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
        raise InvalidArgumentError(f"the arguments of the action {name} are not valid: the action needs {needed}")
    return action(store, actor, **arguments)


_ACTIONS: dict[str, Callable[..., str]] = {"release": release, "sweep": sweep, "cancel": cancel, "alter": alter}
"""The function for each action, by the name of the action. The keyword-only arguments of the function come from the
request."""

NAMES = frozenset(_ACTIONS)
