"""Count the nodes on which the gangs (groups of workers) of this process have workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class _NodesInUse:
    """Nodes on which the gangs of this process have workers, and the time when the number of these nodes last
    changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_gangs: dict[object, frozenset[str]] = {}
        self._changed_at = time.monotonic()

    def set(self, gang: object, nodes: Iterable[str]) -> None:
        with self._lock:
            before = self._number()
            self._of_gangs[gang] = frozenset(nodes)
            if not self._of_gangs[gang]:
                del self._of_gangs[gang]
            if self._number() != before:
                self._changed_at = time.monotonic()

    def get(self) -> tuple[int, float]:
        with self._lock:
            return self._number(), time.monotonic() - self._changed_at

    def _number(self) -> int:
        return len(frozenset().union(*self._of_gangs.values()))


_nodes_in_use = _NodesInUse()


def nodes_in_use() -> tuple[int, float]:
    """Return the number of nodes on which this process has workers, and the seconds since this number last changed."""
    return _nodes_in_use.get()


def record(gang: object, nodes: Iterable[str]) -> None:
    """Record the nodes on which a gang has workers. `nodes` is empty if the gang has ended."""
    _nodes_in_use.set(gang, nodes)
