"""Count the nodes on which the gangs (groups of workers) of this process have workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

_lock = threading.Lock()
_nodes_of_gangs: dict[object, frozenset[str]] = {}
_changed_at = time.monotonic()


def record_nodes(gang: object, nodes: Iterable[str]) -> None:
    """Record the nodes on which a gang has workers. `nodes` is empty if the gang has ended."""
    global _changed_at
    with _lock:
        before = _count()
        _nodes_of_gangs[gang] = frozenset(nodes)
        if not _nodes_of_gangs[gang]:
            del _nodes_of_gangs[gang]
        if _count() != before:
            _changed_at = time.monotonic()


def nodes_in_use() -> tuple[int, float]:
    """Return the number of nodes on which this process has workers, and the seconds since this number last changed."""
    with _lock:
        return _count(), time.monotonic() - _changed_at


def _count() -> int:
    return len(frozenset().union(*_nodes_of_gangs.values()))
