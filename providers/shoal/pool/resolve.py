"""The one rule that says which pool is meant."""

from __future__ import annotations

import os

from shoal.errors import InvalidArgumentError, NoPoolError, PoolNotFoundError
from shoal.pool.journal import rows
from shoal.state import Store
from shoal.state.schema import Pool

POOL_VARIABLE = "SHOAL_POOL"
"""Set by the user, and inside a job by its node."""


def which_pool(store: Store, name: str | None = None) -> str:
    """The argument; inside a job its own; ``$SHOAL_POOL``; the only pool there is.

    Args:
        store: The state store.
        name: What the caller gave.

    Raises:
        PoolNotFoundError: There is no such pool.
        NoPoolError: None was named and there is none.
        InvalidArgumentError: None was named and there is more than one.
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
        raise NoPoolError("there is no pool here: `shoal pool up local://NAME` makes one")
    raise InvalidArgumentError(
        f"which pool? There are {', '.join(known)}: name one (pool_name=) or set {POOL_VARIABLE}"
    )
