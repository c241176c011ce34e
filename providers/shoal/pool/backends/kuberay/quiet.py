"""Looks at pools that do not change, which need few requests.

A look reads the RayCluster, its pods and Ray's nodes. Each process that reconciles a pool or waits for it looks at it
every second, in each home. So a look that has found nothing to report counts for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from shoal.pool.backends.base import NodeRef, Seen
from shoal.pool.spec import PoolSpec
from shoal.state.schema import NodeState

PERIOD = 5.0
"""Seconds for which such a look counts. Ray needs longer than this to notice that a machine is gone."""

_quiet: dict[str, tuple[object, float]] = {}
"""By the URI of a pool: its rows at the last look if there was nothing to report, and the time until which this look
counts, in the monotonic seconds of this process."""


def look(spec: PoolSpec, nodes: Sequence[NodeRef], ask: Callable[[PoolSpec, Sequence[NodeRef]], Seen]) -> Seen:
    """Return what `ask` sees, or nothing if it has seen nothing for these nodes a short time ago.

    Args:
        spec: The pool.
        nodes: The nodes to look at.
        ask: Looks at the nodes with requests.
    """
    rows = {node.id: (node.state, dict(node.endpoint or {})) for node in nodes if node.state is not NodeState.ENDING}
    last, until = _quiet.pop(spec.uri, (None, 0.0))
    is_quiet = last == rows and monotonic() < until
    seen = Seen() if is_quiet else ask(spec, nodes)
    if seen == Seen():
        _quiet[spec.uri] = (rows, until if is_quiet else monotonic() + PERIOD)
    return seen
