"""Looks at pools that do not change: fewer and fewer requests, until something changes.

A look reads the RayCluster, its pods and Ray's nodes. Each process that reconciles a pool or waits for it looks at it
every second, in each home. So a look that has found nothing to report counts for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shoal.pool.backends.base import NodeRef, Seen
from shoal.pool.spec import PoolSpec
from shoal.state.schema import NodeState

LONGEST_PERIOD = 8.0
"""Longest time in seconds between two looks at a pool that does not change. Ray needs longer than this to notice that a
machine is gone."""

_FIRST_PERIOD = 1.0

_quiet: dict[str, tuple[object, float, float]] = {}
"""Rows of a pool at the last look if nothing had changed, the time at which they are looked at again, and the period
until then. Times are the monotonic seconds of this process. The key is the URI of the pool."""


def look(spec: PoolSpec, nodes: Sequence[NodeRef], ask: Callable[[PoolSpec, Sequence[NodeRef]], Seen]) -> Seen:
    """Return what `ask` sees, or nothing if it has seen nothing for these nodes a short time ago.

    Args:
        spec: The pool.
        nodes: The nodes to look at.
        ask: Looks at the nodes with requests.
    """
    rows = {node.id: (node.state, dict(node.endpoint or {})) for node in nodes if node.state is not NodeState.ENDING}
    now = time.monotonic()
    last, due, period = _quiet.get(spec.uri, (None, now, 0.0))
    if last == rows and now < due:
        return Seen()
    seen = ask(spec, nodes)
    if seen == Seen():
        period = min(2 * period, LONGEST_PERIOD) if last == rows and period else _FIRST_PERIOD
        _quiet[spec.uri] = (rows, time.monotonic() + period, period)
    else:
        _quiet.pop(spec.uri, None)
    return seen
