"""Own one local node: ``python -m shoal.pool.supervisor NODE_ID EPOCH``, a name that running pools rely on."""

from __future__ import annotations

from shoal.pool.backends.local.supervisor import main

if __name__ == "__main__":
    main()
