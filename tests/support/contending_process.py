"""One of many processes that want something of a pool of tiny nodes at once."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from shoal.errors import InvalidArgumentError, ScaleError
from shoal.pool.api import ComputePool


def contend(what: str, size: int, go: Event, told: Connection) -> None:
    """Wait for the signal, so that all begin together, and tell what became of it.

    Args:
        what: "scale" or "lease".
        size: Nodes.
        go: The signal.
        told: Gets one sentence.
    """
    pool = ComputePool("tiny")
    go.wait()
    try:
        if what == "scale":
            pool.scale(size)
        else:
            with pool.lease(size):
                held = len(pool.get_nodes())
                assert held >= size, f"{held} of {size} nodes while it held the lease"
        told.send("done")
    except (InvalidArgumentError, ScaleError) as error:
        told.send(f"refused: {error}")
