"""Let embedded pools (pools that belong to one process or job) use the GPUs of this machine one after another. A pool
that needs GPUs waits until earlier pools have released enough GPUs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shoal.errors import CapacityTimeoutError
from shoal.pool.backends.local.gpus import Claimant, Gpu, look, may_be_contended, store_here, visible_gpus
from shoal.pool.backends.local.processes import NODE_TAG
from shoal.pool.spec import PoolSpec
from shoal.state.locks import open_locked
from shoal.state.temp_folder import gpu_lock

_LOOK_S = 1.0
"""Seconds between two checks whether the GPUs are free. A pool needs 1 to 3 s to end."""


@contextmanager
def gpu_turn(
    spec: PoolSpec, timeout_s: float | None, say: Callable[[str], None], least: int = 1
) -> Iterator[list[Gpu]]:
    """Wait until other embedded pools have released enough GPUs, and yield the GPUs of this machine.

    The caller starts its pool inside the ``with`` block. During the block, no other embedded pool that uses GPUs can
    start, so two pools cannot use the same free GPUs. Pools that are not embedded may stay up for ever, so the function
    does not wait for them.

    Raises:
        CapacityTimeoutError: The GPUs were not released in time. The message names the pools that use them.
    """
    if not spec.gpus_per_node or not may_be_contended(os.environ):
        yield []
        return
    found = visible_gpus(os.environ)
    if not found:
        yield found
        return
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    said, pools = "", ""
    while True:
        with open_locked(gpu_lock("embedded"), wait=False) as is_mine:
            if is_mine:
                waits_for = _claimants(spec, found, least)
                if not waits_for:
                    yield found
                    return
                pools = ", ".join(sorted({claimant.pool for claimant in waits_for}))
        if time.monotonic() >= until:
            raise CapacityTimeoutError(
                f"the GPUs of this machine did not become free within {timeout_s:g} s (run_config.timeout). Embedded "
                f"pools of this user have claimed them: {pools or 'a pool that is just starting'}. Wait until their "
                "jobs have ended, cancel these jobs, or set a longer timeout"
            )
        if pools != said:
            say(
                f"waiting for the GPUs of this machine, which the embedded pools of other calls have claimed: {pools}. "
                "The wait ends when the jobs of these pools have ended"
            )
            said = pools
        time.sleep(_LOOK_S)


def _claimants(spec: PoolSpec, found: Sequence[Gpu], least: int) -> list[Claimant]:
    """Return the nodes of embedded pools that have to release their GPUs before the given pool can start.

    The result is empty if the pool can start now, or if it would have too few GPUs even after those nodes have ended.
    """
    free, claimants = look(found)
    needed = spec.gpus_per_node if spec.gpus_per_node > 0 else least
    # If a job is submitted again, its embedded pool may already be up. This pool already has its GPUs and need not
    # wait.
    is_up = any(claimant.pool == spec.name and claimant.store in ("", store_here()) for claimant in claimants)
    if free >= needed or is_up:
        return []
    # If this process runs on a node, do not wait for that node, because it cannot end before this process.
    own = os.environ.get(NODE_TAG)
    ending = [claimant for claimant in claimants if claimant.embedded and claimant.node != own]
    return ending if free + len(ending) >= needed else []
