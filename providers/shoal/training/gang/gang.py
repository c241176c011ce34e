"""Start the workers of one training, run functions on all of them, and raise the error that caused a failure.

A gang is the group of workers of one training. Each worker is a Ray actor, or a child process of the driver, and keeps
a socket to the driver open (`connection`), so that the driver notices at once when the worker dies. A run ends when
every rank has returned a result, or at the first failure. After a failure the gang collects the errors of all ranks for
a few seconds, raises the most likely cause, and kills all workers. If a worker has died, its death is the most likely
cause, because it also causes errors in the other workers. A gang that failed is never used again.

After a run, this process keeps the idle gang for the next run with the same number and size of workers, because
starting workers takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any, Protocol, TypeVar

from shoal.errors import ShoalError, TrainingError, WorkerLostError
from shoal.secrets.redaction import hide_known
from shoal.training import cluster, timeouts
from shoal.training.gang import placement
from shoal.training.gang.child_processes import finder, on_nodes_with_ray, on_nodes_without_ray
from shoal.training.gang.connection import NODE_LOST, EventKind, WorkerConnections
from shoal.training.gang.placement import GangShape
from shoal.training.gang.ray_actors import RayActors
from shoal.training.gang.worker import Failure, Lost, PeerError, Place, Success, WorkerInfo, Workers
from shoal.training.host import own_process
from shoal.training.host.memory import OomKills
from shoal.training.reporting import say


class Sidecar(Protocol):
    """Interface of a sidecar: a helper process or thread, such as XGBoost's tracker, that ends with the gang."""

    def close(self) -> None:
        """Stop this sidecar, and release its resources."""
        ...


class _Weight(IntEnum):
    """Kinds of failures, sorted from the most likely to the least likely cause. If several workers fail, the gang
    reports only the most likely cause."""

    STARVED = 0
    """A worker was killed because memory ran out. Only Ray reports this reason; the worker's socket (its connection to
    the driver) only shows that the worker is gone."""
    LEFT = 1
    """A worker has ended its own process, and has sent the reason."""
    EXITED = 2
    """A worker's process has ended with a known exit code or signal. This event follows `LOST` or `LEFT` at once if the
    driver has started the process."""
    LOST = 3
    """A worker's process or node is gone."""
    RAISED = 4
    """The code that ran in a worker raised an exception."""
    SIDECAR = 5
    """A helper such as XGBoost's tracker failed, possibly because a worker had ended."""
    PEER = 6
    """A worker could not reach another worker."""


class _TimeLimitError(Exception):
    """Raised if a run has not ended at its deadline. An own class, because `on_note` may raise a TimeoutError."""


@dataclass(frozen=True, slots=True)
class _Cause:
    weight: _Weight
    error: ShoalError
    raised_by: int | None = None
    """Rank of a worker that is alive and has raised the error."""
    lost: int | None = None
    """Rank of a worker that was lost."""
    reason: str = ""
    """Why it was lost, as a clause."""


_REPORTS = 2


class _Losses:
    """Reports on the workers that were lost, until each of them is complete.

    A lost worker is reported twice: its socket to the driver closes, and its call ends. A worker that is replaced too
    early would be taken for lost by the second report.
    """

    def __init__(self) -> None:
        self._reports: dict[int, list[_Cause]] = {}
        self._deadlines: dict[int, float] = {}
        self.last: _Cause | None = None

    @property
    def deadline(self) -> float:
        """Time at which a worker of which only one report has come counts as unreachable, from `time.monotonic`."""
        return min(self._deadlines.values(), default=math.inf)

    def add(self, rank: int, cause: _Cause) -> _Cause | None:
        """Add a report, and return the most likely cause if the process of the worker has surely ended."""
        self.last = cause
        reports = self._reports.setdefault(rank, [])
        reports.append(cause)
        if len(reports) < _REPORTS:
            self._deadlines[rank] = time.monotonic() + timeouts.UNREACHABLE_WORKER_S
            return None
        del self._reports[rank], self._deadlines[rank]
        return min(reports, key=lambda each: each.weight)


@dataclass(frozen=True, slots=True)
class _Answer:
    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class _Message:
    """A note or a question of a worker, or the end of its call."""

    rank: int
    kind: EventKind
    content: dict[str, Any]


_Event = _Cause | _Answer | _Message
_C = TypeVar("_C", bound=Sidecar)
OnNote = Callable[[int, dict[str, Any]], None]
"""Type of a function that is called with a worker's rank and a note (JSON data, such as metrics) from this worker."""


Reply = Callable[[Any], None]
"""Type of a function that sends the answer to a worker's question, as JSON data."""
OnQuestion = Callable[[int, dict[str, Any], Reply], None]
"""Type of a function that is called with a worker's rank, a question of this worker, and the function that answers it,
at once or later: the worker waits for the answer."""
OnLost = Callable[[int, str], bool]
"""Type of a function that is called with the rank of a worker that was lost and replaced, and the reason. It returns
whether the new worker calls the function again; if not, the run fails."""


class Gang:
    """Workers of one training, which run functions for the driver; :meth:`start` creates a gang."""

    def __init__(self, shape: GangShape) -> None:
        self.shape = shape
        self.workers: tuple[WorkerInfo, ...] = ()
        self.ended = False
        self._workers: Workers | None = None
        self._sidecars: dict[str, Sidecar] = {}
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._connections: WorkerConnections | None = None
        self._places: list[Place] = []
        self._env: dict[str, str] = {}
        self._preloaded: tuple[Sequence[str], bool] = (), False
        self.oom_kills = OomKills()

    @classmethod
    def start(
        cls, shape: GangShape, *, timeout: float = timeouts.RESOURCES_WAIT_S, env: Mapping[str, str] | None = None
    ) -> Gang:
        """Start all workers of a gang; if one of them cannot start, end the others.

        This process must be connected to a cluster. The ranks are numbered node by node: first the workers on the head
        node, then the workers on the other nodes, sorted by name.

        Raises:
            CapacityError: The active nodes are too small for the gang, or had no free room within `timeout`.
            WorkerLostError: A worker died, or did not answer in time, while it started.
        """
        gang = cls(shape)
        try:
            deadline = time.monotonic() + timeout
            if (register := cluster.register()) is not None:
                gang._workers = on_nodes_without_ray(shape, deadline, register)
            elif (find_nodes := finder(shape)) is not None:
                gang._workers = on_nodes_with_ray(shape, deadline, find_nodes)
            else:
                gang._workers = RayActors(shape, deadline)
            gang._spawn(gang._workers, dict(env or {}))
        except BaseException:
            gang.end()
            raise
        return gang

    @property
    def host(self) -> str:
        """Address at which all nodes can reach the driver."""
        return self._started.host

    @property
    def _started(self) -> Workers:
        assert self._workers is not None
        return self._workers

    @property
    def sound(self) -> bool:
        """Whether the gang can run a function: it has not ended or failed, and all its workers are alive."""
        return (
            not self.ended
            and not self._failed.is_set()
            and self._connections is not None
            and len(self._connections.connected()) == self.shape.num_workers
        )

    def can_move_from(self) -> list[str]:
        """Return the names of the gang's nodes that will shut down soon; an empty list if no other nodes have room for
        the workers of these nodes.
        """
        rooms = cluster.rooms()
        leaving = [worker for worker in self.workers if worker.node_id in rooms and rooms[worker.node_id].leaving]
        if not leaving or self.shape.per_node:
            return []
        staying = [room.free for room in rooms.values() if not room.leaving]
        if placement.room(self.shape, staying) < len(leaving):
            return []
        return sorted({worker.node for worker in leaving})

    def sidecar(self, name: str, make: Callable[[Callable[[str], None]], _C]) -> _C:
        """Return the sidecar with the given name, and create it at the first call.

        :meth:`end` closes the sidecar.
        """
        if name not in self._sidecars:
            self._sidecars[name] = make(lambda what: self._note(_Cause(_Weight.SIDECAR, TrainingError(what))))
        return self._sidecars[name]  # type: ignore[return-value]

    def preload(self, modules: Sequence[str], *, complete: bool = False) -> None:
        """Tell the workers to import modules in the background."""
        self._preloaded = modules, complete
        self._started.preload(modules, complete, range(self.shape.num_workers))

    def run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        *,
        timeout: float | None = None,
        on_note: OnNote | None = None,
        report_uneven: bool = True,
        on_question: OnQuestion | None = None,
        on_lost: OnLost | None = None,
    ) -> list[Any]:
        """Call a function in every worker and wait for all results. Notes and questions of the workers are passed to
        `on_note` and `on_question` in this thread.

        Args:
            function: The function.
            args_per_rank: Arguments of the function, for each rank.
            timeout: Seconds until the call fails; None: no limit.
            on_note: Function that gets the workers' notes.
            report_uneven: Whether the log says which ranks return long after others, because ranks that train together
                would wait for each other.
            on_question: Function that answers the workers' questions.
            on_lost: Function that is told of a lost worker when another worker has its place. None: a lost worker ends
                the run. The workers must not depend on each other.

        Raises:
            WorkerLostError: A worker's process or node was lost.
            ShoalError: The run failed for another reason. The message names the rank that most likely caused the
                failure, and the exception's notes contain the traceback of this rank. After any exception, all
                processes of the gang have ended.
        """
        if self.ended:
            raise TrainingError("this gang has ended and cannot run another function: start a new one with Gang.start")
        try:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            return self._run(
                function, args_per_rank, deadline, on_note, on_question, on_lost, report_uneven=report_uneven
            )
        except _TimeLimitError:
            self.end()
            raise TrainingError(
                "the training did not end within its time limit (RunConfig.timeout): increase or remove the limit"
            ) from None
        except BaseException:
            self.end()
            raise

    def finish(self, *, timeout: float | None = None) -> None:
        """End the workers of a gang that has done its work, after the code in them has ended as an interpreter ends:
        threads that are no daemons have ended, exit handlers have run, and open files are written.

        After 30 s, or `timeout`, the workers are killed. What fails here is only printed, because the work is done.
        """
        limit = timeouts.WORKER_FINISH_S if timeout is None else min(timeout, timeouts.WORKER_FINISH_S)
        try:
            if self.sound:
                self._run(own_process.end_user_code, [()] * self.shape.num_workers, time.monotonic() + limit, None)
        except _TimeLimitError:
            say(
                f"a worker was killed, because its threads and exit handlers did not end within {limit:g} s after the "
                "training: end threads before the function returns, or start them with daemon=True"
            )
        except ShoalError as error:
            say(f"after the end of the training: {error}")
        finally:
            self.end()

    def end(self) -> None:
        """Kill the workers, wait until they have ended, and close the sidecars (helpers such as XGBoost's tracker).

        Further calls have no effect.
        """
        if self.ended:
            return
        self.ended = True
        placement.record_nodes(self, ())
        with contextlib.suppress(Exception):
            # Killing actors fails if Ray is already shut down. The error is ignored, because the actors have then
            # ended, too.
            if self._workers is not None:
                self._workers.kill()
        if (connections := self._connections) is not None:
            if not connections.wait_all_gone(timeouts.WORKER_KILL_S):
                # Ray cannot kill workers on a node whose raylet (Ray's process on the node) is dead or stopped. A
                # worker ends itself when its socket to the driver is closed, so the sockets are closed now.
                connections.hang_up()
                if not connections.wait_all_gone(timeouts.WORKER_END_S):
                    say(
                        f"a worker of the gang of {self.shape} cannot be reached: the worker will end itself when its "
                        "host runs again"
                    )
            connections.close()
        for sidecar in self._sidecars.values():
            sidecar.close()
        with contextlib.suppress(Exception):
            if self._workers is not None:
                self._workers.clean_up()

    # Starting

    def _spawn(self, workers: Workers, env: dict[str, str]) -> None:
        placement.record_nodes(self, (seat.node_id for seat in workers.seats))
        seats = workers.seats[: self.shape.num_workers]
        size = len(seats)
        connections = WorkerConnections(workers.listen_host, size, self._on_event)
        self._connections = connections
        self._env = env
        self._places = places = [
            Place(rank, size, min(size, seat.local_world_size), connections.host, connections.port, connections.token)
            for rank, seat in enumerate(seats)
        ]
        deadline = time.monotonic() + timeouts.WORKER_START_S
        joined = workers.join(places, env, timeouts.WORKER_START_S)
        infos = [WorkerInfo(rank, seat.node, next(joined).pid, seat.node_id) for rank, seat in enumerate(seats)]
        self.workers = tuple(infos)
        # Another thread reads the first message (hello) of each worker's socket. A worker's join() may return before
        # the message was read, so this code waits until the first messages of all workers were read.
        if not connections.wait_joined(size, max(0.1, deadline - time.monotonic())):
            raise WorkerLostError(
                f"a worker of the gang of {self.shape} could not connect to the driver at {connections.host}: check "
                "that every node can connect to this address"
            )

    def _replace(self, rank: int) -> None:
        """Start a worker in the place of one that has ended.

        Raises:
            WorkerLostError: The node of the worker has ended, or the new worker died or did not answer in time.
        """
        assert self._connections is not None
        gone = self._connections.wait_replaceable(rank, timeouts.WORKER_END_S)
        deadline = time.monotonic() + timeouts.WORKER_REPLACE_S
        joined = self._started.replace(rank, self._places[rank], self._env, timeouts.WORKER_REPLACE_S)
        self._started.preload(*self._preloaded, [rank])
        left = max(0.1, deadline - time.monotonic())
        if not gone or not self._connections.wait_joined(self.shape.num_workers, left):
            raise WorkerLostError(f"{self._who(rank)} was lost, and a new worker could not connect to the driver")
        workers = list(self.workers)
        workers[rank] = replace(workers[rank], pid=joined.pid)
        self.workers = tuple(workers)
        self._failed.clear()

    # Running

    def _run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        deadline: float,
        on_note: OnNote | None,
        on_question: OnQuestion | None = None,
        on_lost: OnLost | None = None,
        *,
        report_uneven: bool = True,
    ) -> list[Any]:
        size = self.shape.num_workers
        self._started.run(function, dict(enumerate(args_per_rank)), self._answered)
        results: dict[int, Any] = {}
        talking = set(range(size))
        report_at = math.inf
        losses = _Losses()
        while talking or len(results) < size:
            event = self._next(min(deadline, report_at, losses.deadline))
            if event is None and losses.deadline <= min(deadline, report_at):
                event, on_lost = losses.last, None
            if event is None and report_at < deadline:
                report_at = math.inf
                say(_uneven(results, size))
                continue
            if event is None:
                raise _TimeLimitError
            if isinstance(event, _Message):
                if event.kind is EventKind.DONE:
                    talking.discard(event.rank)
                elif event.kind is EventKind.QUESTION:
                    assert on_question is not None, "a worker asked, but the driver answers no questions"
                    assert self._connections is not None
                    on_question(event.rank, event.content, partial(self._connections.answer, event.rank))
                elif on_note:
                    on_note(event.rank, event.content)
            elif isinstance(event, _Answer):
                if not results and report_uneven:
                    report_at = time.monotonic() + timeouts.UNEVEN_RETURN_S
                results[event.rank] = event.value
            elif on_lost and (rank := event.lost) is not None and rank not in results and NODE_LOST not in event.reason:
                if loss := losses.add(rank, event):
                    self._replace(rank)
                    if not on_lost(rank, loss.reason):
                        raise event.error
                    self._started.run(function, {rank: args_per_rank[rank]}, self._answered)
            else:
                raise self._first_cause(event, talking, on_note)
        return [results[rank] for rank in range(size)]

    def _first_cause(self, first: _Cause, talking: set[int], on_note: OnNote | None) -> ShoalError:
        """Wait up to 5 s for further failures and return the error that most likely caused the others.

        The error gets the notes of the other failures, too.

        The wait is only 0.5 s if one of the errors reports something else than an unreachable worker, and all notes of
        the workers that raised errors have arrived: they come by another socket than the errors.
        """
        began = time.monotonic()
        causes = [first]
        while all(cause.weight is not _Weight.STARVED for cause in causes):
            known = any(cause.weight is not _Weight.PEER for cause in causes)
            complete = all(cause.raised_by not in talking for cause in causes)
            event = self._next(
                began + (timeouts.FURTHER_ERRORS_S if known and complete else timeouts.UNREACHABLE_WORKER_S)
            )
            if event is None:
                break
            if isinstance(event, _Cause):
                causes.append(event)
            elif isinstance(event, _Message) and event.kind is EventKind.DONE:
                talking.discard(event.rank)
            elif isinstance(event, _Message) and event.kind is EventKind.NOTE and on_note:
                # The cause of the failure matters more than an error in storing a note.
                with contextlib.suppress(Exception):
                    on_note(event.rank, event.content)
        # The cause with the lowest weight is the most likely one. If several causes have the same lowest weight, min()
        # returns the earliest of them.
        chosen = min(causes, key=lambda cause: cause.weight)
        for cause in causes:
            for note in () if cause is chosen else getattr(cause.error, "__notes__", ()):
                chosen.error.add_note(note)
        return chosen.error

    def _answered(self, rank: int, outcome: Success | Failure | Lost) -> None:
        """Record that a worker's call has ended or that the worker died; this method is called from another thread."""
        who = self._who(rank)
        error: ShoalError
        if isinstance(outcome, Success):
            self._note(_Answer(rank, outcome.value))
        elif isinstance(outcome, Failure):
            error = TrainingError(f"{who} failed: {outcome.summary}")
            if outcome.error is not None:
                # The constructor is not called, because that of a user's subclass may take other arguments.
                error = outcome.error
                error.args = (f"{error} [{who}]",)
            error.add_note(f"In {who}:\n{outcome.traceback}")
            self._note(_Cause(_Weight.PEER if isinstance(error, PeerError) else _Weight.RAISED, error, rank))
        elif outcome.out_of_memory is not None:
            error = WorkerLostError(
                f"{who} was killed because its node ran out of memory: "
                "use more nodes or larger ones, or fewer workers per node"
            )
            error.out_of_memory = True
            error.add_note(outcome.out_of_memory)
            self._note(_Cause(_Weight.STARVED, error, lost=rank, reason="its node ran out of memory"))
        else:
            weight = _Weight.LOST if outcome.exit_code is None else _Weight.EXITED
            self._note(self._lost(rank, weight, outcome.reason, outcome.exit_code))

    def _on_event(self, rank: int, kind: EventKind, text: str) -> None:
        """Handle a message from a worker, or the loss of a worker; the thread of the `WorkerConnections` calls this
        method."""
        if kind is EventKind.LINE:
            # Printing fails if the output of this process is closed or accepts only ASCII. A failure to print must not
            # end the training, so it is ignored.
            with contextlib.suppress(OSError, ValueError):
                say(text)
        elif kind in (EventKind.DONE, EventKind.NOTE, EventKind.QUESTION):
            # Notes get into the store and into MLflow.
            self._note(_Message(rank, kind, hide_known(json.loads(text or "{}"))))
        elif not self.ended:
            self._note(self._lost(rank, _Weight.LEFT if kind is EventKind.LEFT else _Weight.LOST, text))

    def _lost(self, rank: int, weight: _Weight, reason: str, exit_code: int | None = None) -> _Cause:
        killed = self.oom_kills.told()
        # The counter has all processes of the driver's container, also those of other jobs.
        may_be_mine = weight is not _Weight.LEFT and own_process.is_loopback(self._started.listen_host)
        was_killed = exit_code in (None, -signal.SIGKILL)
        if killed:
            reason += f". Since the training began, {killed}: use more nodes or larger ones, or fewer workers per node"
        error = WorkerLostError(f"{self._who(rank)} was lost: {reason}")
        error.out_of_memory = bool(killed) and may_be_mine and was_killed
        return _Cause(weight, error, lost=rank, reason=reason)

    def _note(self, event: _Event) -> None:
        if isinstance(event, _Cause):
            self._failed.set()
        self._events.put(event)

    def _next(self, deadline: float) -> _Event | None:
        """Wait for the next event of a worker or sidecar and return it; return None when the deadline has passed."""
        try:
            wait = deadline - time.monotonic()
            return self._events.get(timeout=None if wait == math.inf else max(0.0, wait))
        except queue.Empty:
            return None

    def _who(self, rank: int) -> str:
        return str(self.workers[rank]) if rank < len(self.workers) else f"rank {rank}"


def _uneven(returned: Collection[int], size: int) -> str:
    """Return a message about ranks that have not returned long after others have."""
    waiting = [rank for rank in range(size) if rank not in returned]
    return (
        f"{_ranks(sorted(returned))} returned {timeouts.UNEVEN_RETURN_S:.0f} s ago, but {_ranks(waiting)} did not: "
        "uneven batches? A rank that trains on more batches than another waits for it in a collective operation and "
        "does not end. If the rank is only saving its model, ignore this message"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


_idle: dict[tuple[Any, ...], Gang] = {}
_idle_lock = threading.Lock()


@contextlib.contextmanager
def shared_gang(
    shape: GangShape, *, timeout: float = timeouts.RESOURCES_WAIT_S, env: Mapping[str, str] | None = None
) -> Iterator[Gang]:
    """Provide a gang to one run, and keep the gang for later runs with the same number and size of
    workers.

    An idle gang keeps its CPUs until :func:`end_gangs` is called, this process ends, or a run needs workers of another
    number or size.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room within `timeout`.
        WorkerLostError: A worker died while it started.
    """
    key = (shape, tuple(sorted((env or {}).items())))
    with _idle_lock:
        gang = _idle.pop(key, None)
    if gang is None or not gang.sound:
        if gang is not None:
            gang.end()
        # Other idle gangs still reserve CPUs that the new gang may need, so they are ended first.
        end_gangs()
        gang = Gang.start(shape, timeout=timeout, env=env)
    gang.oom_kills = OomKills()
    try:
        yield gang
    except BaseException:
        gang.end()
        raise
    _end_at_exit()
    with _idle_lock:
        spare = _idle.setdefault(key, gang)
    if spare is not gang:
        # Another thread of this driver has just stored an idle gang with the same number and size of workers. Only one
        # such gang is kept, so the gang of this run ends.
        gang.finish()


def end_gangs() -> None:
    """End the idle gangs that this process keeps for later runs."""
    while True:
        with _idle_lock:
            if not _idle:
                return
            _, gang = _idle.popitem()
        gang.finish()


@functools.cache
def _end_at_exit() -> None:
    # Exit handlers run in reverse order of their registration. This handler needs Ray, so it must run before Ray's own
    # handler shuts Ray down. Ray registers its handler when it is imported, so this handler is registered after the
    # import of Ray.
    atexit.register(end_gangs)
