"""One of many that want something of a pool of tiny nodes at once: ``python -m tests.pool.contender scale|lease SIZE``.

Waits for a line on standard input, so that all begin together. Prints what became of it, on one line.
"""

from __future__ import annotations

import sys

from shoal.errors import InvalidArgumentError, ScaleError
from shoal.pool.api import ComputePool
from shoal.pool.backends import BACKENDS
from tests.pool.tiny import TinyBackend


def main() -> None:
    BACKENDS["local"] = TinyBackend
    import shoal.pool.api as api

    api.ensure_running = lambda: None
    what, size = sys.argv[1], int(sys.argv[2])
    pool = ComputePool("tiny")
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        if what == "scale":
            pool.scale(size)
        else:
            with pool.lease(size):
                held = len(pool.get_nodes())
                assert held >= size, f"{held} of {size} nodes while it held the lease"
        print("done")
    except (InvalidArgumentError, ScaleError) as error:
        print(f"refused: {error}".replace("\n", " "))


if __name__ == "__main__":
    main()
