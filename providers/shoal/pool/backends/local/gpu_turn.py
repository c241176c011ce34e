"""Let embedded pools use the GPUs of this machine in turn: a pool starts when an earlier one has released them."""

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
"""Seconds between two checks whether the GPUs are free. A pool that ends needs 1 to 3 s for this."""


@contextmanager
def gpu_turn(
    spec: PoolSpec, timeout_s: float | None, say: Callable[[str], None], least: int = 1
) -> Iterator[list[Gpu]]:
    """Wait until the GPUs are free that other embedded pools have claimed, and yield the GPUs of this machine.

    In the block, the caller starts its pool. No other embedded pool that uses GPUs starts meanwhile, so that two of
    them cannot find the same GPUs free. Pools that are not embedded may stay up for ever, so they are not waited for.

    Args:
        spec: Definition of the pool that the caller starts.
        timeout_s: Longest time to wait, in seconds. None: no limit.
        say: Function that is called with a text about the wait when it begins, and when other pools have the GPUs.
        least: Number of GPUs that the pool needs at least if its definition asks for all that are free.

    Raises:
        CapacityTimeoutError: The GPUs were not released in time. The message names the pools that have claimed them.
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
    """Return the nodes of embedded pools that have to release their GPUs before a pool can start; none if it can start
    now, or if it would have too few GPUs even then."""
    free, claimants = look(found)
    needed = spec.gpus_per_node if spec.gpus_per_node > 0 else least
    # The pool is up already, because its job is submitted again.
    is_up = any(claimant.pool == spec.name and claimant.store in ("", store_here()) for claimant in claimants)
    if free >= needed or is_up:
        return []
    # The node of this process cannot end before this process.
    own = os.environ.get(NODE_TAG)
    ending = [claimant for claimant in claimants if claimant.embedded and claimant.node != own]
    return ending if free + len(ending) >= needed else []
