"""Answers of the heads of pools, which background threads request, so that no page waits for a head."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shoal.pool.backends import BACKENDS, Seen
from shoal.pool.lease_queue import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.pool.status import check_nodes
from shoal.ui.formats import utc

log = logging.getLogger("shoal.ui")

T = TypeVar("T")

_FRESH_S = 5.0
"""Seconds for which an answer is used before the head is asked again."""

_MOST_THREADS = 16
"""Largest number of requests at the same time, so that heads that do not answer use few threads."""

_MOST_KEPT = 256


@dataclass(frozen=True)
class _Answer(Generic[T]):
    value: T
    read_at: float


class BackgroundReader(Generic[T]):
    """Cache of values whose reading may take long. Threads read the values; the callers get the last ones at once.

    Args:
        monotonic: Returns seconds of a clock that never jumps.

    Attributes:
        version: Number that increases whenever a value has changed.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, _Answer[T]] = OrderedDict()
        self._pending: set[str] = set()

    def last(self, key: str, read: Callable[[], T]) -> T | None:
        """Return the last value, or None if none was read yet. If the value is missing or older than 5 s, a thread
        reads it again.
        """
        with self._lock:
            answer = self._answers.get(key)
            is_fresh = answer is not None and self._monotonic() - answer.read_at < _FRESH_S
            if not is_fresh and key not in self._pending and len(self._pending) < _MOST_THREADS:
                self._pending.add(key)
                try:
                    threading.Thread(target=self._read, args=(key, read), name="shoal-ui-head", daemon=True).start()
                except RuntimeError:  # no thread is left
                    self._pending.discard(key)
        return None if answer is None else answer.value

    def _read(self, key: str, read: Callable[[], T]) -> None:
        try:
            value = read()
        except Exception:  # the page shows the last value, and the next view reads again
            log.exception("a pool's head could not be asked")
            with self._lock:
                self._pending.discard(key)
            return
        with self._lock:
            old = self._answers.pop(key, None)
            self._answers[key] = _Answer(value, self._monotonic())
            while len(self._answers) > _MOST_KEPT:
                self._answers.popitem(last=False)
            self._pending.discard(key)
            self.version += old is None or old.value != value


class HeadAnswers:
    """Nodes of pools as the heads report them, without a wait for heads that are reached over the network.

    Args:
        clock: Returns seconds since the epoch.
        monotonic: Returns seconds of a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reader: BackgroundReader[Seen] = BackgroundReader(monotonic)
        self._answered_at: dict[str, float] = {}

    @property
    def version(self) -> int:
        """Return a number that increases whenever the answer of a head has changed."""
        return self._reader.version

    def check(self, snapshot: Snapshot) -> Seen:
        """Return which nodes of a pool are lost. Nodes of a head on the network are those of its last answer; before
        the first answer, the rows of the store count."""
        spec = PoolSpec.model_validate(snapshot.pool.spec)
        if BACKENDS[spec.backend]().bound_to_host or not snapshot.nodes:
            return check_nodes(snapshot)
        key = f"{spec.name} {spec.uri}"
        return self._reader.last(key, lambda: self._ask(key, snapshot)) or Seen()

    def _ask(self, key: str, snapshot: Snapshot) -> Seen:
        seen = check_nodes(snapshot)
        if seen.silence is None:
            self._answered_at[key] = self._clock()
            return seen
        at = self._answered_at.get(key)
        since = "since the page's server was started" if at is None else f"after {utc(at)}"
        return replace(seen, silence=f"{seen.silence} (no answer {since})")
