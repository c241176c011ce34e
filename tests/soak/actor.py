"""The process that a round kills: ``python -m tests.soak.actor OPERATION [SIZE] [DEADLINE]``.

Says "go" when the operation begins, then how it ended. What the core refuses or rolls back is an ending like success;
anything else is a traceback, and fails the round.
"""

from __future__ import annotations

import sys

from shoal.errors import ShoalError
from shoal.jobs import sweep
from shoal.pool.api import ComputePool
from shoal.state import Store

URI = "local://soak?max_nodes=4"
HOLDER = "test:soak"
LEASE_TTL = 24 * 3600.0
"""Longer than any soak: leases end here by being released."""


def carry_out(operation: str, size: int, deadline: float) -> None:
    pool = ComputePool(URI, holder=HOLDER)
    match operation:
        case "up":
            pool.up()
        case "grow" | "shrink":
            pool.scale(size)
        case "rollback":
            pool.scale(size, options={"rollback_after_seconds": deadline})
        case "lease":
            pool.lease(size, ttl=LEASE_TTL, bring_up=True)
        case "release":
            pool.release()
        case "sweep":
            sweep(Store())
        case "down":
            pool.down()
        case "down, up":
            pool.down()
            pool.up()
        case _:
            raise ValueError(operation)


def main() -> None:
    operation, size, deadline = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    print("go", flush=True)
    try:
        carry_out(operation, size, deadline)
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], flush=True)
    else:
        print("done", flush=True)


if __name__ == "__main__":
    main()
