"""Base class of shoal's triggers, and the thread that reads the store for all triggers of a process."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from shoal.background_threads import BackgroundThread
from shoal.errors import ShoalError, StoreUnreachableError
from shoal.state import Store
from shoal.state.home import default_url

_DEFERRED = "deferred"

_LINES_AT_ONCE = 50
"""Number of lines that are written to the task's log before the event loop serves the other triggers."""

_STORE_RETRY_S = 5.0
"""Seconds between two tries to open a store that does not answer."""


@dataclass(kw_only=True, eq=False, repr=False)
class WaitTrigger(BaseTrigger):
    """Base class of triggers that wait for a change in shoal's store, at most until a deadline.

    The trigger fires one event, a dict with ``timed_out``. The task then continues in a worker, which reads the result
    from the store. If the triggerer is killed, another triggerer continues the wait with the same deadline.

    :param poll_interval: Seconds between two checks of the store.
    :param deadline: Time at which the wait ends in any case, in seconds since the epoch. None: no deadline.
    """

    poll_interval: float = 5.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the path of the class and the arguments of the constructor, from which Airflow creates the trigger."""
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            name: getattr(self, name) for name in signature(kind).parameters
        }

    @abstractmethod
    def new_wait(self) -> Wait:
        """Create the `Wait` object through which the poller of this process sends updates to this trigger."""

    @abstractmethod
    async def end(self) -> None:
        """Cancel the job or the request for nodes that the task waits for, because a user has ended the task."""

    def event(self, wait: Any, *, timed_out: bool) -> dict[str, Any]:
        """Return the payload of the event that the trigger fires."""
        return {"timed_out": timed_out}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and fire an event when the wait is over or the deadline has passed."""
        while True:
            try:
                polled = await asyncio.to_thread(poller)
                break
            except StoreUnreachableError:
                await asyncio.sleep(_STORE_RETRY_S)
        wait = self.new_wait()
        polled.add(wait)
        timed_out = False
        try:
            is_over = False
            while not is_over:
                update = await wait.update(self.deadline)
                for number, line in enumerate(update.lines, 1):
                    self.log.info("%s", line)
                    if number % _LINES_AT_ONCE == 0:
                        await asyncio.sleep(0)
                if update.log_position is not None:
                    wait.log_position = update.log_position
                is_over = update.is_over
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError:
            # Airflow before 3.3 does not call `on_kill`, but only cancels `run`. So `on_kill` is called here.
            if not hasattr(BaseTrigger, "on_kill"):
                await self.on_kill()
            raise
        finally:
            polled.remove(wait)
        yield TriggerEvent(self.event(wait, timed_out=timed_out))  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancel the job or the request for nodes that the task waits for. Do not cancel if the task is still deferred:
        another triggerer then continues the wait.

        Airflow calls this method if a user marks or clears the task. Airflow 3.3.2 also calls this method if another
        triggerer has taken the trigger over, because this triggerer did not answer for some time. The task is still
        deferred when another triggerer takes the trigger over.
        """
        # Airflow cancels `on_kill` after 30 s. `asyncio.shield` lets `_end_unless_deferred` go on nevertheless.
        self._ending = asyncio.ensure_future(self._end_unless_deferred())
        await asyncio.shield(self._ending)

    async def _end_unless_deferred(self) -> None:
        try:
            # Airflow 3.2.0 needs the event loop of this thread to ask for the task's state, and finds the loop only if
            # the call is made through `sync_to_async`.
            state = await sync_to_async(self._task_state)()
        # If Airflow does not answer, the job is not cancelled here. A job that no task waits for ends by itself after
        # the time `orphan_after`.
        except Exception:
            self.log.warning("Airflow did not report the task's state, so nothing is cancelled", exc_info=True)
            return
        if state == _DEFERRED:
            self.log.info("the task is still deferred: another triggerer goes on with the wait")
            return
        await self.end()

    def _task_state(self) -> str | None:
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        ti = self.task_instance
        assert ti is not None
        states = RuntimeTaskInstance.get_task_states(
            dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
        ).get(ti.run_id, {})
        state = states.get(ti.task_id if ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}")
        return None if state is None else str(getattr(state, "value", state))


log = logging.getLogger(__name__)

_ROUND_S = 0.5
"""Shortest time between two rounds of a poller. Waits that are due within this time share their queries."""

_ACTORS = 4
"""Number of threads for slow calls, such as a request to a pool's head that does not answer."""


@dataclass(frozen=True)
class Update:
    """Message from the poller to a wait, with new log lines or with the end of the wait.

    Attributes:
        lines: Lines for the task's log.
        log_position: Position in the job's log after `lines`; None if the lines are not from the job's log.
        is_over: Whether the wait is over, because the job or the operation has ended, or an error has occurred. The
            task, which continues in a worker, reads the result or the error from the store itself.
    """

    lines: Sequence[str] = ()
    log_position: int | None = None
    is_over: bool = False


@contextmanager
def isolated(what: str) -> Iterator[None]:
    """Log an error of the ``with`` block instead of raising it, so that one wait's error does not stop the other waits.

    Raises:
        StoreUnreachableError: The store does not answer, so that reading the state of the other waits would fail, too.
    """
    try:
        yield
    except StoreUnreachableError:
        raise
    except Exception:
        log.exception("reading the state of %s failed", what)


class Wait(ABC):
    """Base class of waits. A wait is an object through which the poller sends updates to one trigger.

    Create the wait in the event loop of its trigger.

    Args:
        poll_interval: Seconds between two checks.
    """

    log_position = 0
    """Position in the job's log up to which the lines are in the task's log already."""

    def __init__(self, poll_interval: float) -> None:
        self.poll_interval = poll_interval
        self.next_look = 0.0
        self.act: Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()

    @classmethod
    @abstractmethod
    def look_at_all(cls, store: Store, waits: Collection[Any]) -> None:
        """Read the rows of several waits of this class with as few queries as possible, and send each wait its update.

        If a wait needs a slow call, such as a request to a pool's head, this method stores the call in the wait's
        attribute `wanted`.
        """

    wanted: Callable[[], Any] | None = None
    """Slow call that the poller has to make for this wait in another thread; None if there is no such call."""

    @property
    def is_busy(self) -> bool:
        """Return whether this wait's slow call is still running in another thread."""
        return self.act is not None and not self.act.done()

    def send(self, update: Update) -> None:
        """Send an update to the trigger; any thread may call this method."""
        # The event loop is closed if the triggerer is ending. In this case another triggerer continues the wait.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def update(self, deadline: float | None) -> Update:
        """Wait for the poller's next update, and return this update.

        Raises:
            TimeoutError: The deadline has passed.
        """
        remaining = None if deadline is None else max(0.0, deadline - time.time())
        return await asyncio.wait_for(self._updates.get(), remaining)


class Poller:
    """Thread that reads the store for all waits of this process. The thread runs only while there are waits.

    Args:
        url: SQLAlchemy URL of the store.
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._waits: set[Wait] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._actors = ThreadPoolExecutor(_ACTORS, "shoal-poller")

    def add(self, wait: Wait) -> None:
        """Start polling the store for a wait."""
        # A new triggerer gets all waits at once. The first checks are spread over the interval, so that updates keep
        # the event loop busy for a short time only: updates for 1,000 waits at once took 1 s.
        wait.next_look = time.monotonic() + random.random() * wait.poll_interval
        with self._lock:
            self._waits.add(wait)
            if self._thread is None:
                self._thread = BackgroundThread(self._run, name="shoal-poller", stop=self._ends.set)
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        """Stop polling the store for a wait."""
        with self._lock:
            self._waits.discard(wait)

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                if not self._waits:
                    self._thread = None
                    return
                now = time.monotonic()
                due = [wait for wait in self._waits if wait.next_look <= now]
            for kind in {type(wait) for wait in due}:
                self._look(kind, [wait for wait in due if type(wait) is kind])
            self._ends.wait(_ROUND_S)

    def _look(self, kind: type[Wait], waits: Sequence[Wait]) -> None:
        try:
            kind.look_at_all(self._store, waits)
        except ShoalError as error:
            # The jobs and nodes do not depend on this process. So the error is only logged, and the poller reads the
            # store again later.
            log.warning("the store could not be read for %d deferred tasks: %s", len(waits), error)
        # An error in one row must not end this thread, because all other waits depend on this thread.
        except Exception:
            log.exception("reading the store for %d deferred tasks failed", len(waits))
        now = time.monotonic()
        for wait in waits:
            wait.next_look = now + wait.poll_interval
            wanted, wait.wanted = wait.wanted, None
            if wanted is not None and not wait.is_busy:
                # The interpreter may be ending. In this case another triggerer continues the wait.
                with suppress(RuntimeError):
                    wait.act = self._actors.submit(_done, wanted)


def _done(wanted: Callable[[], Any]) -> None:
    try:
        wanted()
    except ShoalError as error:
        log.warning("a step of a deferred task's wait failed and will be repeated: %s", error)
    except Exception:
        log.exception("a step of a deferred task's wait failed and will be repeated")


_pollers: dict[str, Poller] = {}
_opening = threading.Lock()


def poller() -> Poller:
    """Return this process's poller for the store at the default URL. The call may block, because it may open the
    store."""
    url = default_url()
    with _opening:
        if url not in _pollers:
            _pollers[url] = Poller(url)
        return _pollers[url]
