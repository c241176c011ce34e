"""Triggers with which deferred tasks wait for jobs and for nodes in Airflow's triggerer, without a slot of a worker,
and the thread that reads the store for all of them."""

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
from typing import Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async
from sqlalchemy import select

from shoal.airflow.results import state_key
from shoal.background_threads import BackgroundThread
from shoal.errors import PoolNotFoundError, ScaleError, ShoalError, StoreUnreachableError
from shoal.jobs.files.logs import LogFollower
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Mark
from shoal.jobs.journal.stages import is_waiting
from shoal.jobs.reconcile import acts
from shoal.jobs.reconcile.look import PollTimer, Target, log_follower
from shoal.jobs.reconcile.rounds import Waiter
from shoal.pool.api import ComputePool
from shoal.pool.journal import rows
from shoal.pool.scaling_plan import Snapshot
from shoal.pool.selection import which_pool
from shoal.pool.status import PoolStatus, status_of
from shoal.state import Store
from shoal.state.home import default_url
from shoal.state.schema import JOB_ENDED, Job, JobState, Operation, OperationState

log = logging.getLogger(__name__)

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

    wait_type: ClassVar[type[Wait]]
    """Class of the object through which the poller of this process sends updates to this trigger."""

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
        wait = self.wait_type(self)
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
        state = states.get(state_key(ti.task_id, ti.map_index))
        return None if state is None else str(getattr(state, "value", state))


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
        trigger: The trigger that waits.
    """

    log_position = 0
    """Position in the job's log up to which the lines are in the task's log already."""

    def __init__(self, trigger: WaitTrigger) -> None:
        self.poll_interval = trigger.poll_interval
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


_SILENT_S = 15.0
"""Seconds without a heartbeat of a job's driver after which the trigger asks the pool's head node whether the driver
still runs. A running driver writes a heartbeat every few seconds."""

_COPY_S = 30.0
"""Seconds between two reads of a log that is on another machine. Ray's API returns the whole log each time."""

_MARK_S = 30.0
"""Longest time in seconds between two writes of the current position in a job's log to the store. If the triggerer is
killed, the next triggerer repeats the log lines since the last write."""

_MOST_LOG_BYTES = 256 * 1024
"""Largest number of bytes that are read from a log at a time, so that a long log does not delay the other waits."""


_CANCELLING = ThreadPoolExecutor(8, "shoal-cancelling")
"""Threads that cancel jobs. Cancelling a job takes seconds. The event loop's own threads are not used, because there
are few of them and all triggers need them."""


class JobWait(Wait):
    """Object that waits for the end of an attempt of a job."""

    def __init__(self, trigger: JobTrigger) -> None:
        super().__init__(trigger)
        self.key = Key(trigger.job_id, trigger.attempt)
        self.trigger = trigger
        self.log_position = trigger.log_position
        self.wants_credentials = False
        self._waiter: Waiter | None = None
        self._follower: LogFollower | None = None
        self._poll_timer = PollTimer()
        self._heartbeat: float | None = None
        self._marked = self.log_position
        self._silent_since = self._settled = self._copied = self._marked_at = time.monotonic()
        self._shown_place = ""

    @classmethod
    def look_at_all(cls, store: Store, waits: Collection[JobWait]) -> None:
        """Read the jobs of all waits with one query, send each wait its update, and record in the store that a process
        polls these jobs."""
        jobs = attempts.look_at(store, {wait.key for wait in waits})
        marks = []
        for wait in waits:
            job = jobs.get(wait.key)
            if job is None or job.state in JOB_ENDED:
                wait.send(Update(is_over=True))
                continue
            if job.state is JobState.PENDING and job.driver_key is not None:
                wait.wants_credentials = True
                wait.send(Update(is_over=True))
                continue
            with isolated(f"job {wait.key.job_id}"):
                wait._see(store, job)
            # A mark records two facts: that a process polls the job, and how far the job's log was copied.
            now, position = time.monotonic(), wait.log_position
            is_behind = position != wait._marked and now - wait._marked_at >= _MARK_S
            if wait._poll_timer.is_due(job, time.time()) or is_behind:
                wait._marked, wait._marked_at = position, now
                marks.append(Mark(wait.key, position, wait.trigger.task_try))
        if marks:
            attempts.touch_all(store, marks, time.time())

    def _see(self, store: Store, job: Job) -> None:
        if self._waiter is None or self._follower is None:
            # An earlier triggerer may have waited for this job, and have copied its log up to `log_shown`.
            if job.task_try == self.trigger.task_try and job.log_shown is not None:
                self.log_position = job.log_shown
            if self.trigger.pool is not None:
                with suppress(PoolNotFoundError):
                    which_pool(store, self.trigger.pool)  # this home may act on the pool that the task has named
            target = Target(store, self.key, job.pool, actor=job.holder)
            self._waiter, self._follower = Waiter(target, shares_looks=True), log_follower(target, self.log_position)
        now = time.monotonic()
        if job.heartbeat_at != self._heartbeat:
            self._heartbeat, self._silent_since = job.heartbeat_at, now
        if self.is_busy:
            return
        if job.state is JobState.RUNNING and self._follower.has_file:
            self._read_log(self._follower)
        elif job.state is JobState.RUNNING and now - self._copied >= _COPY_S:
            self._copied = now
            self.wanted = lambda follower=self._follower: self._read_log(follower)
            return
        if is_waiting(job):
            is_due = now - self._settled >= self._waiter.turn_check_s
        else:
            is_due = now - max(self._silent_since, self._settled) >= _SILENT_S
        if is_due:
            self._settled = now
            self.wanted = lambda waiter=self._waiter: self._reconcile(waiter)

    def _read_log(self, follower: LogFollower) -> None:
        lines = tuple(follower.lines(ended=False, most_bytes=_MOST_LOG_BYTES))
        if lines:
            self.send(Update(lines, follower.position))

    def _reconcile(self, waiter: Waiter) -> None:
        """Start the job if it is queued and its pool has enough free resources, or record the job's end if its driver
        was lost."""
        job = waiter.round()
        place = str(waiter.place or "")
        if place and place != self._shown_place:
            self._shown_place = place
            self.send(Update([f"waiting for room on pool {job.pool}: {place}"]))


@dataclass(kw_only=True, eq=False, repr=False)
class JobTrigger(WaitTrigger):
    """Trigger that waits until an attempt of a job has ended, and copies the job's log to the task's log.

    If the triggerer is killed, the next triggerer may repeat the log lines of the last 30 s.

    :param job_id: Id of the job.
    :param attempt: Number of the attempt.
    :param submissions: Number of submissions of the job when the task was deferred. If the job was submitted again
        since then, the job belongs to a newer try of the task.
    :param task_try: Number of the try of the task.
    :param log_position: Position in the job's log up to which the lines are in the task's log already.
    :param cancel_on_kill: Whether the job is cancelled if a user marks or clears the task.
    :param pool: Name of the job's pool, as the task has named it. None: an earlier version has deferred the task.
    """

    wait_type = JobWait

    job_id: str
    attempt: int
    submissions: int
    task_try: int
    log_position: int = 0
    cancel_on_kill: bool = True
    pool: str | None = None

    def event(self, wait: JobWait, *, timed_out: bool) -> dict[str, Any]:
        """Return the payload of the event: the job, and the position in the job's log from which the task continues to
        copy the log."""
        # The triggerer has no credentials. So the task continues in a worker, which sends the credentials and defers
        # the task again.
        wants = {"wants_credentials": True} if wait.wants_credentials else {}
        job = {"job_id": self.job_id, "attempt": self.attempt, "submissions": self.submissions}
        return {**job, "timed_out": timed_out, "log_position": wait.log_position, **wants}

    async def end(self) -> None:
        """Cancel the job, unless a newer try of the task has attached to the job."""

        def cancel() -> bool:
            store, key = Store(), Key(self.job_id, self.attempt)
            job = attempts.load(store, key)
            target = Target(store, key, job.pool, actor=job.holder)
            reason = "the deferred task was marked or cleared"
            return acts.cancel(target, job, reason, most_submissions=self.submissions).is_done

        if not self.cancel_on_kill:
            self.log.info("job %s goes on (cancel_on_kill=False)", self.job_id)
        elif not await asyncio.get_running_loop().run_in_executor(_CANCELLING, cancel):
            self.log.info(
                "job %s is not cancelled: it has ended, or a newer try of the task has attached to it", self.job_id
            )


_RENEW_S = 60.0
"""Seconds between two renewals of a lease during a wait, far below the lease's time to live of 15 minutes."""


class PoolWait(Wait):
    """Object that waits for nodes of a pool, or for the end of an operation (a request to change the pool's size).

    If the trigger has no `nodes`, only the end of the operation ends the wait; if it has no `operation_id`, the wait is
    only for nodes.
    """

    def __init__(self, trigger: PoolTrigger) -> None:
        super().__init__(trigger)
        self.trigger = trigger
        self._client: ComputePool | None = None
        self._renewed = time.monotonic()
        self._shown = ""

    @classmethod
    def look_at_all(cls, store: Store, waits: Collection[PoolWait]) -> None:
        """Read the rows of all pools once, and send an update to each wait."""
        operations = [wait.trigger.operation_id for wait in waits if wait.trigger.operation_id is not None]
        with store.reading(snapshot=False) as session:
            query = select(Operation.id).where(Operation.id.in_(operations), Operation.state == OperationState.OPEN)
            is_open = set(session.scalars(query)) if operations else set()
        of_pool: dict[str, list[PoolWait]] = {}
        for wait in waits:
            of_pool.setdefault(wait.trigger.pool, []).append(wait)
        with store.reading() as session:
            snapshots = {each.pool.name: each for each in rows.load_all(session, of_pool)}
        for name, its_waits in of_pool.items():
            with isolated(f"pool {name}"):
                cls._look_at_pool(store, name, snapshots.get(name), its_waits, is_open)

    @classmethod
    def _look_at_pool(
        cls, store: Store, name: str, snapshot: Snapshot | None, waits: Collection[PoolWait], is_open: Collection[str]
    ) -> None:
        if snapshot is None:  # no pool has this name any more
            for wait in waits:
                wait.send(Update(is_over=True))
            return
        status = status_of(snapshot, time.time())
        for wait in waits:
            with isolated(f"a wait for pool {name}"):
                wait._see(store, snapshot, status, is_open)

    def _see(self, store: Store, snapshot: Snapshot, status: PoolStatus, is_open: Collection[str]) -> None:
        trigger = self.trigger
        text = f"pool {trigger.pool}: {status.progress(trigger.holder)}"
        lines = [text] if text != self._shown else []
        self._shown = text
        if self._client is None:
            self._client = ComputePool(trigger.pool, holder=trigger.holder, store=store)
        is_over = trigger.operation_id is not None and trigger.operation_id not in is_open
        if not is_over and trigger.nodes is not None:
            try:
                is_over = self._client.has_nodes(trigger.nodes, snapshot=snapshot, status=status)
            except ScaleError:  # The wait ends. The task continues in a worker and raises this error.
                is_over = True
        if lines or is_over:
            self.send(Update(lines, is_over=is_over))
        now = time.monotonic()
        if now - self._renewed >= _RENEW_S:
            self._renewed = now
            self.wanted = self._client.renew


@dataclass(kw_only=True, eq=False, repr=False)
class PoolTrigger(WaitTrigger):
    """Trigger that waits for nodes of a pool, or for the end of a request for nodes, and renews the DAG run's lease.

    :param pool: Name of the pool.
    :param holder: Name of the holder whose lease is renewed.
    :param nodes: Number of ready nodes with which the wait is over.
    :param operation_id: Id of the operation that requests the nodes. If a user marks or clears the task, the operation
        is rolled back, unless it has ended or a newer operation has replaced it.
    """

    wait_type = PoolWait

    pool: str
    holder: str
    nodes: int | None = None
    operation_id: str | None = None

    async def end(self) -> None:
        """Roll back the request for nodes that the task waits for, unless the request has already ended."""

        def withdraw(operation_id: str) -> None:
            pool = ComputePool(self.pool, holder=self.holder)
            if pool.withdraw(operation_id, "the deferred task was marked or cleared"):
                self.log.info("the request for nodes of pool %s is rolled back", self.pool)

        if self.operation_id is not None:
            await asyncio.to_thread(withdraw, self.operation_id)
