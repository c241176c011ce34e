"""Select the pool to use if the caller does not name one."""

from __future__ import annotations

import os

from sqlalchemy import select

from shoal.errors import NoPoolError, PoolNotFoundError
from shoal.pool import bound_host
from shoal.pool.backends import backend_of
from shoal.pool.bound_host import is_here
from shoal.pool.holder import asking_team, may_change
from shoal.pool.journal import rows
from shoal.pool.spec import PoolSpec, is_uri
from shoal.state import Store
from shoal.state.schema import Pool, PoolState

POOL_VARIABLE = "SHOAL_POOL"
"""Environment variable with the name of the default pool. Users may set it. In the processes of a job, shoal sets it to
the pool that the job runs on."""


def defined_pool(name: str | None = None) -> PoolSpec | None:
    """Return the settings of the pool that a call uses if `name`, else ``$SHOAL_POOL``, is a URI such as
    ``local://retrain?max_nodes=4``. Return None if it is the name of a pool, or if neither is given.

    Raises:
        InvalidArgumentError: The URI is wrong.
    """
    given = name or os.environ.get(POOL_VARIABLE)
    return PoolSpec.parse(given) if given and is_uri(given) else None


def which_pool(store: Store, name: str | None = None, *, only_up: bool = False, team: str | None = None) -> str:
    """Return the name of the pool to use: `name`, else ``$SHOAL_POOL``, else the only pool that is up. Both may also be
    the URI of a pool.

    If no pool is up, the only pool in the store is used. A pool that is up on another host does not count as up,
    because only that host can use it, and neither does a pool that belongs to another team than `team`, or than that of
    the process (`asking_team`). Embedded pools (pools that belong to one process) are used only if they are named.

    Inside a job, ``$SHOAL_POOL`` is the pool that the job runs on.

    A pool that is named or given is recorded in this home (`shoal.pool.bound_host`). Only recorded pools are selected.

    Raises:
        PoolNotFoundError: No pool has this name.
        NoPoolError: No pool was named, and the store contains no pool or several possible pools. The message lists
            these pools.
    """
    defined = defined_pool(name)
    given = defined.name if defined else name or os.environ.get(POOL_VARIABLE)
    with store.reading() as session:
        if given:
            if (pool := session.get(Pool, given)) is None:
                raise PoolNotFoundError(given, rows.pool_names(session))
            bound_host.accept(pool, defined)
            return given
        known = rows.pool_names(session)
        asks = asking_team(team)
        pools = session.scalars(select(Pool).where(Pool.name.in_(known)).order_by(Pool.name))
        mine = [pool for pool in pools if bound_host.refusal(pool) is None]
        usable = [each for each in mine if may_change(each.spec.get("only_team"), asks, is_reserved=True)]
        up = [pool.name for pool in usable if pool.state is PoolState.UP and is_here(pool)]
    candidates = up if up or only_up else [pool.name for pool in mine]
    if len(candidates) == 1:
        return candidates[0]
    if not known:
        raise NoPoolError("the store contains no pool: create one with `shoal pool up local://NAME`")
    named = f"name one with pool_name= or the environment variable {POOL_VARIABLE}"
    if up:
        raise NoPoolError(f"no pool was named, and several are up ({', '.join(sorted(up))}): {named}")
    raise NoPoolError(
        f"no pool was named, and none is up on this host (the store contains {', '.join(known)}): start one with "
        f"`shoal pool up NAME`, or {named}"
    )


def is_embedded(store: Store, name: str) -> bool:
    """Return whether a pool belongs to one process or one job."""
    return store.scalar(select(Pool.owner).where(Pool.name == name)) is not None


def pool_without_folder(folder: str, name: str | None = None) -> str | None:
    """Return the name of the pool that a call uses (see `which_pool`) if its nodes may be on other machines, which do
    not share a folder with this machine; None if they have the folder, or if the call uses an embedded pool."""
    store, spec = Store(), defined_pool(name)
    if spec is None:
        try:
            selected = which_pool(store, name, only_up=True)
        except (NoPoolError, PoolNotFoundError):
            return None
        with store.reading() as session:
            spec = PoolSpec.model_validate(session.get_one(Pool, selected).spec)
    has_folder = backend_of(spec).shares_files or spec.shares(folder)
    return None if has_folder else spec.name
