"""The host and the home that may act on a pool: only its own host can start and end the nodes of a local pool, and a
process starts programs, reads files and follows addresses only for the pools that its home has recorded.

Everyone who can write to the store can write a pool's row. So a home keeps those settings of a pool that lead to
programs, files and requests: when the pool is started from here, and when a user names a pool that all hosts may use or
gives its settings. shoal does nothing by itself for a pool whose row has other settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import shown
from shoal.os_processes import host_id, hostname
from shoal.pool.options import missing
from shoal.pool.options.base import is_pool_name
from shoal.pool.spec import PoolSpec
from shoal.state.home import home, is_own_store, store_tag, subfolder, write_file
from shoal.state.schema import Pool

_HARMLESS = frozenset({
    "min_nodes", "max_nodes", "cpus_per_node", "gpus_per_node", "object_store_mb", "idle_timeout", "ray",
    "ray_dashboard", "libraries", "only_team",
})  # fmt: skip
"""Settings that lead to no program, file or request. All others are recorded, so a new setting is, too."""


def record(spec: PoolSpec) -> None:
    """Record the settings of a pool that is started from this home, or that a user has given.

    Raises:
        StoreError: The file cannot be written.
    """
    _write(spec.name, _leading(spec.model_dump(mode="json")))


def accept(pool: Pool, given: PoolSpec | None = None) -> None:
    """Record the settings in a pool's row if they are the user's input.

    Args:
        pool: Row of the pool that the user has named.
        given: Settings of the pool that the user has given. They count if the row has the same. None: only the name;
            it counts for a pool that all hosts may use, and that this home has not recorded yet.
    """
    is_new = given is None and not pool.host and refusal(pool, is_new=True) is None
    if is_new or (given is not None and _leading(given.model_dump(mode="json")) == _leading(pool.spec)):
        _write(pool.name, _leading(pool.spec))


def refusal(pool: Pool, *, is_new: bool = False) -> str | None:
    """Return the reason why this home may not act on a pool's row, and what to do; None if it may.

    Args:
        pool: Row of the pool.
        is_new: Whether the pool need not be recorded yet, because a user has named it.
    """
    if why := missing(pool.spec.get("backend", "local")):
        return why
    name, settings = pool.name, _leading(pool.spec)
    if not is_pool_name(name) or settings.get("name") != name:
        return (
            f"the pool {shown(name)} in the store has a name that no call of shoal has given it: nothing is done with "
            "it; delete its row from the table pools"
        )
    try:
        kept = json.loads(_file(name).read_text())
    except (FileNotFoundError, ValueError):  # the host may have lost its power while the record was written
        return None if is_new else (
            f'pool "{name}" is not recorded in {home()}, so shoal does nothing with it by itself here: if the pool is '
            f"yours, give its URI or name it, as in `shoal pool up {name}`; use a local:// pool with the SHOAL_HOME "
            "with which it was started"
        )  # fmt: skip
    if kept == settings:
        return None
    other = sorted(key for key in kept.keys() | settings.keys() if kept.get(key) != settings.get(key))
    return (
        f'the row of pool "{name}" in the store has another {", ".join(other)} than {home()} has recorded, so shoal '
        "does nothing with it by itself here: if the change is yours, give the pool's URI to a call on this host; if "
        f"not, remove the pool with `shoal pool delete {name} --abandon`"
    )


def _file(name: str) -> Path:
    """Return the path of the record of a pool, in the folder that is removed with the pool."""
    return home() / "pools" / name / f"recorded{store_tag()}.json"


def _write(name: str, settings: Mapping[str, Any]) -> None:
    subfolder("pools", name)
    write_file(_file(name), json.dumps(settings))


def _leading(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _HARMLESS and value is not None}


ANYWHERE = ""
"""Value of a pool's `host` column if any host can start and end the pool's nodes, as for an existing Ray cluster."""


def is_here(pool: Pool) -> bool:
    """Return whether this process can start and end a pool's nodes: this machine can, and the home has recorded the
    pool as its row is now."""
    return is_on_this_host(pool) and refusal(pool) is None


def is_on_this_host(pool: Pool) -> bool:
    """Return whether a pool is bound to this machine, or to none. A process is on no host of another store than its
    own."""
    return is_own_store() and (pool.host == ANYWHERE or pool.host_id == host_id())


def unrecorded(pool: Pool) -> str | None:
    """Return the reason why this home does nothing with a pool that this machine could use, and what to do; None if
    there is no such reason."""
    return refusal(pool) if is_on_this_host(pool) else None


def bind_here(pool: Pool) -> None:
    """Record in a pool's row that the pool is bound to this machine."""
    pool.host, pool.host_id = hostname(), host_id()


def is_bound_here(pool: Pool) -> bool:
    """Return whether a pool's row contains this machine's current hostname and host id. Also return True if the pool is
    bound to no host."""
    return pool.host == ANYWHERE or (pool.host, pool.host_id) == (hostname(), host_id())
