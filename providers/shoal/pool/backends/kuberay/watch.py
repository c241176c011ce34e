"""When a pool on Kubernetes is looked at, and when its objects are read again. The Kubernetes API reports each change
of a RayCluster and its pods to a process that watches them, so a pool in which nothing happens needs few requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from threading import Lock, Thread
from time import monotonic

from shoal.errors import InvalidArgumentError, PoolUnreachableError
from shoal.pool.backends.interface import NodeRef, Seen
from shoal.pool.backends.kuberay.client import WATCH_LIFE, KubeClient
from shoal.pool.backends.kuberay.resources import Pod, RayCluster
from shoal.pool.spec import PoolSpec
from shoal.state.schema import NodeState

PERIOD = 5.0
"""Seconds for which a look that has found nothing to report counts if the pool is not watched. Ray needs longer than
this to notice that a machine is gone."""

WATCHED_PERIOD = 15.0
"""The same if the pool is watched and no change was reported. The look then asks Ray alone."""

_READ_PERIOD = 120.0
"""Seconds after which the objects are read again although no change was reported, because a dead connection reports
none."""

_RETRY = 60.0
"""Seconds between two starts of a watch. The account may have no right to watch."""

_KINDS = "rayclusters", "pods"
"""Kinds of objects that are watched, each by a thread."""

log = logging.getLogger(__name__)


Rows = Mapping[str, tuple[NodeState, Mapping[str, str]]]
Objects = tuple[RayCluster | None, list[Pod]]
"""The RayCluster of a pool, or None if it does not exist, and its pods, the oldest first."""


@dataclass(frozen=True)
class _Seen:
    """What the look of a moment depends on: the pool's rows, and the number of changes that were reported before."""

    rows: Rows
    changes: int
    at: float

    def holds(self, now: _Seen, period: float) -> bool:
        """Return whether nothing has changed since this moment, and it is no longer ago than a period."""
        return (self.rows, self.changes) == (now.rows, now.changes) and now.at - self.at < period


class PoolView:
    """What this process has seen of one pool. It watches the pool while somebody looks at it again and again."""

    def __init__(self, spec: PoolSpec) -> None:
        self._spec = spec
        self._lock = Lock()
        self._threads: dict[str, Thread] = {}
        self._answered: set[str] = set()
        self._changes = 0
        self._used = self._started = float("-inf")
        self._quiet: _Seen | None = None
        """The last look, if it has found nothing to report."""
        self._read: tuple[_Seen, Objects] | None = None

    def look(self, nodes: Sequence[NodeRef], ask: Callable[[Callable[[KubeClient], Objects]], Seen]) -> Seen:
        """Return what `ask` sees, or nothing if it has seen nothing for these nodes a short time ago.

        Args:
            nodes: The nodes to look at.
            ask: Looks at them. It gets a function that returns the pool's objects, and reads them only if they may have
                changed. Other rows need another reading: they may name a pod that did not exist before.
        """
        alive = (node for node in nodes if node.state is not NodeState.ENDING)
        now = _Seen({node.id: (node.state, dict(node.endpoint or {})) for node in alive}, self._changes, monotonic())
        self._used, is_watched, quiet = now.at, self._is_watched, self._quiet
        was_quiet = quiet is not None and quiet.rows == now.rows
        if quiet is not None and was_quiet:
            if now.at - quiet.at < PERIOD or (is_watched and quiet.holds(now, WATCHED_PERIOD)):
                return Seen()
            self._watch()

        def objects(client: KubeClient) -> Objects:
            read = self._read
            # While nodes are awaited, objects are always read: a dead connection would report none of their changes.
            if not (is_watched and was_quiet and read and read[0].holds(now, _READ_PERIOD)):
                cluster = client.ray_cluster()
                read = self._read = now, (cluster, client.pods() if cluster else [])
            return read[1]

        seen = ask(objects)
        self._quiet = now if seen == Seen() else None
        return seen

    @property
    def _is_watched(self) -> bool:
        """Whether each change is reported. A fork of this process does not have the threads."""
        return len(self._answered) == len(_KINDS) and all(thread.is_alive() for thread in self._threads.values())

    def _watch(self) -> None:
        """Start to watch the pool, unless it is watched or could not be watched a short time ago."""
        if self._is_watched or monotonic() - self._started < _RETRY or self._lock.locked():
            return
        with self._lock:
            self._started = monotonic()
            for kind in _KINDS:
                if kind not in self._threads or not self._threads[kind].is_alive():
                    self._answered.discard(kind)  # a fork has the answers, but not the threads
                    follow = copy_context().run
                    self._threads[kind] = Thread(target=follow, args=(self._follow, kind), daemon=True)
                    self._threads[kind].start()

    def _follow(self, kind: str) -> None:
        """Count the changes of the objects of one kind, as long as somebody looks at the pool."""
        version = None
        try:
            while monotonic() - self._used < WATCH_LIFE:
                events = KubeClient(self._spec).watch(kind, version)
                self._changes += version is None  # Nobody has reported what changed before.
                self._answered.add(kind)
                event = None
                for event in events:
                    self._changes += event["type"] != "BOOKMARK"
                    # Missing if the version is too old.
                    version = event["object"].get("metadata", {}).get("resourceVersion")
                if event is None:
                    raise PoolUnreachableError("the Kubernetes API, or a server on the way, reports no changes")
                time.sleep(1)  # A server on the way may end each request after its first event.
        except (PoolUnreachableError, InvalidArgumentError) as error:
            log.info("pool %s is looked at more often, because it cannot be watched: %s", self._spec.name, error)
        finally:
            self._answered.discard(kind)


@cache
def view(spec: PoolSpec) -> PoolView:
    """Return what this process has seen of a pool."""
    return PoolView(spec)
