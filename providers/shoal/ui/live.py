"""Read the store and ask the heads of pools for all viewers of the web page, and tell the viewers of changes.

One thread reads the store while at least one viewer is connected. The thread looks for changes with one cheap query per
second, and reads the rows only if there are changes. Pages are built from the last read, so fifty viewers cause no more
queries than one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from shoal.background_threads import BackgroundThread
from shoal.errors import ShoalError
from shoal.jobs.journal import metric_points
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.metric_points import MetricPoint
from shoal.jobs.status import JobLine, StoreMark, job_lines, store_mark
from shoal.pool.api import report_pools
from shoal.pool.backends import backend_of
from shoal.pool.backends.interface import Seen
from shoal.pool.bound_host import is_here
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.spec import PoolSpec
from shoal.pool.status import PoolReport, check_nodes
from shoal.secrets.redaction import redact
from shoal.state import Store
from shoal.ui.formats import utc

log = logging.getLogger("shoal.ui")

PERIOD_S = 1.0
"""Seconds between two queries that look for changes in the store."""

_LOOK_S = 5.0
"""Seconds after which pools are read again even if no row has changed, because the death of a node does not change a
row at once."""

_ALL_JOBS_S = 300.0
"""Seconds after which all jobs are read again. More often, only the jobs whose rows have changed are read."""

_OVERLAP_S = 120.0
"""Seconds by which the periods of two reads of changed jobs overlap, so that changes by hosts with a slow clock are
found."""

_MOST_SERIES = 20
"""Largest number of jobs whose metrics are kept in memory."""


@dataclass(frozen=True)
class Overview:
    """The pools and jobs that one read of the store has found.

    Attributes:
        version: Number that increases with each change of the contents.
        at: Time of the read, in seconds since the epoch.
        pools: All pools in alphabetical order.
        jobs: Attempts of jobs, the newest first.
        problem: Reason why a later read of the store has failed; None if no later read has failed.
    """

    version: int
    at: float
    pools: tuple[PoolReport, ...]
    jobs: tuple[JobLine, ...]
    problem: str | None = None


@dataclass
class _Cache:
    overview: Overview
    mark: StoreMark
    jobs: dict[Key, JobLine]
    looked: float
    """Time of the last look for changes, on the monotonic clock."""
    read: float
    """Time of the last read of the pools, on the monotonic clock."""
    all_jobs_read: float
    """Time of the last read of all jobs, on the monotonic clock."""
    answers: int
    """Version of the heads' answers at the last read."""


class StoreReader:
    """Reader of pools and jobs, which all viewers of one server share.

    Attributes:
        logs: Ends of logs that the heads have sent, and the reason if there is none.
        is_closed: Whether :meth:`close` was called. If so, all streams of events have to end.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._clock = clock
        self._monotonic = monotonic
        self._reading = threading.Lock()
        self._cache: _Cache | None = None
        self._heads = HeadAnswers(clock, monotonic)
        self.logs: BackgroundReader[tuple[str, str | None]] = BackgroundReader(monotonic)
        self._metrics: dict[Key, tuple[JobLine, list[MetricPoint]]] = {}
        self._subscribers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._state = threading.Condition()
        self._thread: threading.Thread | None = None
        self.is_closed = False

    def overview(self) -> Overview:
        """Return the pools and jobs in the store, as read at most a second ago.

        Raises:
            ShoalError: The store cannot be read, and no earlier read has succeeded.
        """
        with self._reading:
            cache, now = self._cache, self._monotonic()
            if cache is not None and now - cache.looked < PERIOD_S:
                return cache.overview
            try:
                return self._read(cache, now)
            except ShoalError as error:
                if cache is None:
                    raise
                cache.looked = now
                problem, old = redact(str(error)), cache.overview
                if old.problem != problem:
                    cache.overview = replace(old, version=old.version + 1, problem=problem)
                return cache.overview

    def read_again(self) -> None:
        """Mark the last read as outdated, so that the store is read again at the next request. Call this method
        after this process has changed the store."""
        with self._reading:
            if self._cache is not None:
                self._cache.looked = -1e9
        with self._state:
            self._state.notify_all()

    def metrics(self, line: JobLine) -> list[MetricPoint]:
        """Return the series of a job's metrics, read once for all viewers, and again when the attempt has changed."""
        read, points = self._metrics.get(line.key, (None, []))
        if read != line:
            points = metric_points.read(self.store, line.key)
            others = {key: each for key, each in self._metrics.items() if key != line.key}
            self._metrics = {line.key: (line, points), **others}
            while len(self._metrics) > _MOST_SERIES:
                self._metrics.popitem()
        return points

    def subscribe(self) -> asyncio.Event:
        """Return an event for the calling coroutine, which is set whenever the store changes."""
        changed = asyncio.Event()
        with self._state:
            self._subscribers[changed] = asyncio.get_running_loop()
            if self._thread is None:
                self._thread = BackgroundThread(self._run, name="shoal-ui-reader", stop=self.close)
                self._thread.start()
        return changed

    def unsubscribe(self, changed: asyncio.Event) -> None:
        """End a subscription. When no subscription is left, the thread that reads the store ends."""
        with self._state:
            self._subscribers.pop(changed, None)
            self._state.notify_all()

    def close(self) -> None:
        """End the thread that reads the store, and all streams of events."""
        with self._state:
            self.is_closed = True
            self._state.notify_all()
        self._tell()

    def _run(self) -> None:
        told = -1
        while True:
            with self._state:
                if self.is_closed or not self._subscribers:
                    self._thread = None
                    return
            try:
                version = self.overview().version
            except ShoalError as error:  # the store cannot be opened now; the viewers' requests show the reason
                log.warning("the store cannot be read: %s", error)
            except Exception:  # if the thread ended here, no page would be updated until the server is restarted
                log.exception("the store cannot be read")
            else:
                if version != told:
                    told = version
                    self._tell()
            with self._state:
                self._state.wait_for(lambda: self.is_closed or not self._subscribers, PERIOD_S)

    def _tell(self) -> None:
        with self._state:
            subscribers = list(self._subscribers.items())
        for changed, loop in subscribers:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the viewer's event loop has ended
                self.unsubscribe(changed)

    def _read(self, cache: _Cache | None, now: float) -> Overview:
        mark = store_mark(self.store)
        answers = self._heads.reader.version + self.logs.version
        is_same = (
            cache is not None and (cache.mark, cache.answers) == (mark, answers) and cache.overview.problem is None
        )
        if cache is not None and is_same and now - cache.read < _LOOK_S:
            cache.looked = now
            return cache.overview
        at = self._clock()
        pools = tuple(report_pools(self.store, embedded=True, check=self._heads.check))
        jobs, all_jobs_read = self._jobs(cache, mark, now, is_same)
        old = cache.overview if cache is not None else None
        if cache is not None and old is not None and is_same and _as_shown(old.pools) == _as_shown(pools):
            cache.looked = cache.read = now
            return old
        ordered = tuple(sorted(jobs.values(), key=lambda job: job.created_at, reverse=True))
        overview = Overview(old.version + 1 if old else 1, at, pools, ordered)
        self._cache = _Cache(overview, mark, jobs, now, now, all_jobs_read, answers)
        return overview

    def _jobs(
        self, cache: _Cache | None, mark: StoreMark, now: float, is_same: bool
    ) -> tuple[dict[Key, JobLine], float]:
        """Return all attempts of all jobs, by job id and attempt number, and the time when all attempts were last read.
        If possible, read only the attempts that have changed since the last read."""
        if cache is not None and now - cache.all_jobs_read < _ALL_JOBS_S:
            if is_same:
                return cache.jobs, cache.all_jobs_read
            changed = {line.key: line for line in job_lines(self.store, changed_since=cache.overview.at - _OVERLAP_S)}
            merged = {**cache.jobs, **changed}
            # If `merged` and the store contain different numbers of attempts, some attempts were deleted. Then
            # all attempts are read again.
            if len(merged) == mark.jobs:
                return merged, cache.all_jobs_read
        return {line.key: line for line in job_lines(self.store)}, now


def _as_shown(pools: tuple[PoolReport, ...]) -> list[object]:
    """Return the pools without the expiry times of leases, so that the renewal of a lease does not count as a change of
    the page. The page does not show expiry times."""
    return [
        (
            report.operations,
            [(lease.id, lease.size, lease.position) for lease in report.status.leases],
            {name: value for name, value in vars(report.status).items() if name not in ("leases", "last_operation")},
        )
        for report in pools
    ]


T = TypeVar("T")

_FRESH_S = 5.0
"""Seconds for which an answer is used before the head is asked again."""

_MOST_THREADS = 16
"""Largest number of requests at the same time, so that heads that do not answer use few threads."""

_MOST_KEPT = 256


class BackgroundReader(Generic[T]):
    """Cache of values whose reading may take long. Threads read the values; the callers get the last ones at once.

    Attributes:
        version: Number that increases whenever a value has changed.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[T, float]] = OrderedDict()  # the values, and when they were read
        self._pending: set[str] = set()

    def last(self, key: str, read: Callable[[], T]) -> T | None:
        """Return the last value, or None if none was read yet. If the value is missing or older than 5 s, a thread
        reads it again.
        """
        with self._lock:
            value, read_at = self._answers.get(key, (None, -math.inf))
            is_fresh = self._monotonic() - read_at < _FRESH_S
            if not is_fresh and key not in self._pending and len(self._pending) < _MOST_THREADS:
                self._pending.add(key)
                try:
                    read_in_store = partial(copy_context().run, self._read, key, read)  # that of the caller
                    threading.Thread(target=read_in_store, name="shoal-ui-head", daemon=True).start()
                except RuntimeError:  # no thread is left
                    self._pending.discard(key)
        return value

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
            self._answers[key] = value, self._monotonic()
            while len(self._answers) > _MOST_KEPT:
                self._answers.popitem(last=False)
            self._pending.discard(key)
            self.version += old is None or old[0] != value


class HeadAnswers:
    """Nodes of pools as the heads report them, without a wait for heads that are reached over the network."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reader: BackgroundReader[Seen] = BackgroundReader(monotonic)
        self._answered_at: dict[str, float] = {}

    def check(self, snapshot: Snapshot) -> Seen:
        """Return which nodes of a pool are lost. Nodes of a head on the network are those of its last answer; before
        the first answer, the rows of the store count."""
        if not (snapshot.nodes and is_here(snapshot.pool)):
            return Seen()
        spec = PoolSpec.model_validate(snapshot.pool.spec)
        if backend_of(spec).answers_at_once:
            return check_nodes(snapshot)
        key = f"{spec.name} {spec.uri}"
        return self.reader.last(key, lambda: self._ask(key, snapshot)) or Seen()

    def _ask(self, key: str, snapshot: Snapshot) -> Seen:
        seen = check_nodes(snapshot)
        if seen.silence is None:
            self._answered_at[key] = self._clock()
            return seen
        at = self._answered_at.get(key)
        since = "since the page's server was started" if at is None else f"after {utc(at)}"
        return replace(seen, silence=f"{seen.silence} (no answer {since})")
