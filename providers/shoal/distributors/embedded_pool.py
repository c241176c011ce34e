"""Find the pool of a call, and start an embedded pool if there is none that the call could use."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import NoPoolError
from shoal.pool.api import ComputePool
from shoal.pool.backends.local.gpus import ALL
from shoal.pool.selection import which_pool
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.process import ProcessId

_numbers = itertools.count(1)


@contextmanager
def pool_for(name: str | None, *, cpus: int = 0, gpus: int = 0) -> Iterator[str]:
    """Yield the name of the pool that a call uses: the pool that is named, else the only pool that is up. Otherwise
    start an embedded pool, and print why.

    Args:
        name: Name of the pool that the user has given; None: the pool in `$SHOAL_POOL`, or the only pool that is up.
        cpus: Number of CPUs that an embedded pool needs at least.
        gpus: Number of GPUs that an embedded pool needs.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    selected, why = None, ""
    try:
        selected = which_pool(Store(), name, only_up=True)
    except NoPoolError as error:
        why = str(error)
    if selected is not None:
        yield selected
        return
    print(f"{why}. This call uses an embedded pool", file=sys.stderr, flush=True)
    with embedded_pool(cpus=cpus, gpus=gpus) as embedded:
        yield embedded


@contextmanager
def embedded_pool(*, cpus: int = 0, gpus: int = 0) -> Iterator[str]:
    """Start a pool with one node for this process, yield its name, and take it down at the end.

    Args:
        cpus: Number of CPUs that the node offers at least. By default, it offers all CPUs of this process.
        gpus: Number of GPUs that the node offers. 0: all GPUs that this process may use and that no other node has
            claimed.

    Raises:
        InvalidArgumentError: This machine has fewer GPUs.
    """
    own = len(os.sched_getaffinity(0))
    spec = PoolSpec(
        name=f"embedded-{os.getpid()}-{next(_numbers)}",
        max_nodes=1,
        cpus_per_node=max(own, cpus),
        gpus_per_node=gpus or ALL,
    )
    few = f" (it offers {cpus} CPUs, as requested, but this process has only {own})" if cpus > own else ""
    print(f"running on a pool that is embedded in this process, {spec.uri}{few}", file=sys.stderr, flush=True)
    pool = ComputePool(spec)
    pool.up(owner=ProcessId.mine())
    try:
        yield pool.name
    finally:
        pool.down()
