"""Start a pool for a plain Python script that trains although no pool exists."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.pool.api import ComputePool
from shoal.pool.spec import PoolSpec
from shoal.state.process import ProcessId

_numbers = itertools.count(1)


@contextmanager
def embedded_pool() -> Iterator[str]:
    """Start a pool with one node, yield its name, and take it down at the end.

    The node has all CPUs of this process, and all GPUs that this process may use and that no other node has claimed.
    """
    spec = PoolSpec(
        name=f"embedded-{os.getpid()}-{next(_numbers)}",
        max_nodes=1,
        cpus_per_node=len(os.sched_getaffinity(0)),
        gpus_per_node=-1,
    )
    print(f"training on a pool that is embedded in this process, {spec.uri}", file=sys.stderr, flush=True)
    pool = ComputePool(spec)
    pool.up(owner=ProcessId.mine())
    try:
        yield pool.name
    finally:
        pool.down()
