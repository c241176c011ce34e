"""Select the pool to use if the caller does not name one."""

from __future__ import annotations

import os

from shoal.errors import InvalidArgumentError, NoPoolError, PoolNotFoundError
from shoal.pool.journal import rows
from shoal.state import Store
from shoal.state.schema import Pool

POOL_VARIABLE = "SHOAL_POOL"
"""Environment variable with the name of the default pool. Users may set it. In the processes of a job, shoal sets it to
the pool that the job runs on."""


def which_pool(store: Store, name: str | None = None) -> str:
    """Return the name of the pool to use: `name`, else ``$SHOAL_POOL``, else the only pool in the store.

    Inside a job, ``$SHOAL_POOL`` is the pool that the job runs on.

    Args:
        store: The state store.
        name: Name given by the caller, if any.

    Raises:
        PoolNotFoundError: No pool has this name.
        NoPoolError: No pool was named, and the store has none.
        InvalidArgumentError: No pool was named, and the store has more than one.
    """
    given = name or os.environ.get(POOL_VARIABLE)
    with store.reading() as session:
        known = rows.pool_names(session)
        if given:
            if session.get(Pool, given) is None:
                raise PoolNotFoundError(given, known)
            return given
    if len(known) == 1:
        return known[0]
    if not known:
        raise NoPoolError("the store contains no pool: create one with `shoal pool up local://NAME`")
    raise InvalidArgumentError(
        f"no pool was named, and the store contains several ({', '.join(known)}): name one with pool_name= or "
        f"the environment variable {POOL_VARIABLE}"
    )
