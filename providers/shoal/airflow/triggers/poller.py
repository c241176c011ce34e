"""Look at the store for all deferred waits of a process, in one thread.

The triggerer runs hundreds of waits in one event loop, which must not block. So no wait reads the store itself: a
poller reads the rows of all waits with few queries, and sends each wait what has changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from shoal.errors import ShoalError, StoreUnreachableError
from shoal.state import Store
from shoal.state.store import default_url

log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""Shortest time between two rounds of a poller. Waits that are due within this time share their queries."""

_ACTORS = 4
"""Number of threads for what may take long, such as a request to the head of a pool that does not answer."""


@dataclass(frozen=True)
class Update:
    """News for a wait.

    Attributes:
        lines: Lines for the task's log.
        log_position: Position in the job's log after `lines`; None if the lines are not from there.
        is_over: Whether the wait is over, because the job or the operation has ended, or an error has occurred. The
            task, which continues in a worker, reads the result or the error from the store itself.
    """

    lines: Sequence[str] = ()
    log_position: int | None = None
    is_over: bool = False


@contextmanager
def isolated(what: str) -> Iterator[None]:
    """Log an error of the ``with`` block, so that the waits after it are looked at, too.

    Args:
        what: What the block looks at.

    Raises:
        StoreUnreachableError: The store does not answer, so that the look at the other waits would fail, too.
    """
    try:
        yield
    except StoreUnreachableError:
        raise
    except Exception:
        log.exception("a look at %s failed", what)


Act = Callable[[], Any]
"""Function that may take long, and so is called in another thread than the poller's."""


class Wait(ABC):
    """One wait of a trigger. It is created in the event loop of the trigger.

    Args:
        poll_interval: Seconds between two looks.
    """

    def __init__(self, poll_interval: float) -> None:
        self.poll_interval = poll_interval
        self.next_look = 0.0
        self.act: Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    @classmethod
    @abstractmethod
    def look_at_all(cls, store: Store, waits: Collection[Any]) -> None:
        """Look at the rows of several waits of this class with as few queries as possible, and send their updates.

        A wait that needs something that may take long gets a function in its attribute `wanted`.
        """

    wanted: Act | None = None
    """What a look found that has to be done for the wait and may take long; None if there is nothing."""

    @property
    def is_busy(self) -> bool:
        """Return whether `wanted` of an earlier look is still being done."""
        return self.act is not None and not self.act.done()

    def send(self, update: Update) -> None:
        """Send an update to the trigger; any thread may call this method."""
        # The loop is closed if the triggerer ends now. Another triggerer then continues the wait.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def update(self, deadline: float | None) -> Update:
        """Return the next update.

        Args:
            deadline: Time in seconds since the epoch.

        Raises:
            TimeoutError: The deadline has passed.
        """
        remaining = None if deadline is None else max(0.0, deadline - time.time())
        return await asyncio.wait_for(self._updates.get(), remaining)


class Poller:
    """Thread that looks at the store for all waits of this process. It runs only while there are waits.

    Args:
        url: SQLAlchemy URL of the store.
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._waits: set[Wait] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._actors = ThreadPoolExecutor(_ACTORS, "shoal-poller")

    def add(self, wait: Wait) -> None:
        """Begin to look at the rows of a wait."""
        # A new triggerer gets all waits at once. Spread over the interval, their updates keep the event loop busy for a
        # short time only: with 1,000 waits, updates for all of them at once took 1 s.
        wait.next_look = time.monotonic() + random.random() * wait.poll_interval
        with self._lock:
            self._waits.add(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shoal-poller", daemon=True)
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        """Do not look at the rows of a wait any more."""
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waits:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [wait for wait in self._waits if wait.next_look <= now]
            for kind in {type(wait) for wait in due}:
                self._look(kind, [wait for wait in due if type(wait) is kind])
            time.sleep(_ROUND_S)

    def _look(self, kind: type[Wait], waits: Sequence[Wait]) -> None:
        try:
            kind.look_at_all(self._store, waits)
        except ShoalError as error:
            # The jobs and nodes do not depend on this process, so it looks again later.
            log.warning("the store could not be read for %d deferred tasks: %s", len(waits), error)
        # One bad row must not end the thread, on which all other waits depend.
        except Exception:
            log.exception("a look at the store for %d deferred tasks failed", len(waits))
        now = time.monotonic()
        for wait in waits:
            wait.next_look = now + wait.poll_interval
            wanted, wait.wanted = wait.wanted, None
            if wanted is not None and not wait.is_busy:
                wait.act = self._actors.submit(_done, wanted)


def _done(wanted: Act) -> None:
    try:
        wanted()
    except ShoalError as error:
        log.warning("a deferred task looks again later: %s", error)
    except Exception:
        log.exception("a deferred task looks again later")


_pollers: dict[str, Poller] = {}
_opening = threading.Lock()


def poller() -> Poller:
    """Return this process's poller for the store of this environment. The call may open the store, and so block."""
    url = default_url()
    with _opening:
        if url not in _pollers:
            _pollers[url] = Poller(url)
        return _pollers[url]
