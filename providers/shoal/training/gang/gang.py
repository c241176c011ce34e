"""A gang: the workers of one training run, all or none, and the first cause when one of them fails.

Each worker is a Ray actor on its own bundle of one placement group, and holds a lifeline to the driver. A run ends when
every rank has answered, or at the first failure: then all are killed, what the ranks said of it is weighed (a death
explains its peers' errors, never the other way round), and the cause is raised. A gang that failed is never used again.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from shoal.errors import CapacityError, ShoalError, TrainingError, WorkerLostError
from shoal.training import cluster
from shoal.training.context import say
from shoal.training.gang.lifeline import EventKind, Switchboard
from shoal.training.gang.worker import Failure, PeerError, Place, Success, Worker, WorkerInfo

# How long a gang waits for CPUs that other work holds. Long enough for a neighbour's training to end, short enough that
# a task of a workflow does not hold its slot for hours.
WAIT_SECONDS = 600.0
# After the first failure: how long to listen for what explains it. Peers of a raising or killed worker failed 0.1 s
# after it, their connections closed by the kernel at once; a host that vanished takes the 4 s of the lifeline's
# keepalive.
_SETTLE_SECONDS = 0.5
_EXPLAIN_SECONDS = 4.5
# Killed processes were gone within 0.1 s here; these bound the waits for a node that is dead, or a host that vanished.
_KILL_SECONDS = 1.0
_END_SECONDS = 4.0
# Actors of a node that is up start in 1 to 5 s, more on a machine that imports in many processes at once.
_START_SECONDS = 120.0
_PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 2.0
# Ray refuses to reserve nothing.
_LEAST = 0.001
# A wait that goes on should not look like a hang.
_SAY_EVERY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GangShape:
    """What makes two gangs alike.

    Args:
        num_workers: Number of workers.
        cpus_per_worker: CPUs that each claims; fractions are Ray's to count.
        gpus_per_worker: GPUs that each claims.
        gpu_type: Type that they must be of; None: any.
        per_node: Workers on each of its nodes, no two of which are one; None: wherever there is room.
        trim_memory: Whether the workers give back what they free at once, so that one library's leavings are another's
            room; a library that frees and asks again all the time is the slower for it.
    """

    num_workers: int
    cpus_per_worker: float
    gpus_per_worker: int = 0
    gpu_type: str | None = None
    per_node: int | None = None
    trim_memory: bool = False

    def __str__(self) -> str:
        each = f"{self.cpus_per_worker:g} CPU{'' if self.cpus_per_worker == 1 else 's'}"
        if self.gpus_per_worker:
            kind = f"{self.gpu_type} GPU" if self.gpu_type else "GPU"
            each += f" and {self.gpus_per_worker} {kind}{'' if self.gpus_per_worker == 1 else 's'}"
        return f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'} of {each}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What is claimed in one piece each, as Ray names it: a worker's share, or that of all workers on a node."""
        together = self.per_node or 1
        gpus = {"GPU": float(self.gpus_per_worker * together)} if self.gpus_per_worker else {}
        if self.gpu_type:
            # A node has 1 of its type, whatever the number of its GPUs: all workers on it share that.
            gpus[cluster.GPU_TYPE + self.gpu_type] = _LEAST
        bundle = {"CPU": max(self.cpus_per_worker, _LEAST) * together, **gpus}
        return [bundle] * (self.num_workers // together)


class Companion(Protocol):
    """Something beside the workers that ends with the gang, such as a tracker."""

    def close(self) -> None:
        """Ends it."""
        ...


class _Weight(IntEnum):
    """How much of the truth an event holds; the lowest explains the others."""

    STARVED = 0
    """A worker was killed for want of memory: Ray knows that, the lifeline only that it is gone."""
    LOST = 1
    """A worker's process or node is gone."""
    RAISED = 2
    """A worker's own code raised."""
    COMPANION = 3
    """The tracker ended; it also does so because a worker did."""
    PEER = 4
    """A worker could not reach another."""


@dataclass(frozen=True, slots=True)
class _Cause:
    weight: _Weight
    error: ShoalError


@dataclass(frozen=True, slots=True)
class _Answer:
    rank: int
    value: Any


@dataclass(frozen=True, slots=True)
class _Done:
    rank: int


@dataclass(frozen=True, slots=True)
class _Note:
    rank: int
    note: dict[str, Any]


_Event = _Cause | _Answer | _Done | _Note
_C = TypeVar("_C", bound=Companion)
OnNote = Callable[[int, dict[str, Any]], None]
"""Called with the rank of a worker and what it told the driver."""


class Gang:
    """Workers on a placement group; :meth:`start` makes one.

    Args:
        shape: Number and size of the workers.
    """

    def __init__(self, shape: GangShape) -> None:
        self.shape = shape
        self.workers: tuple[WorkerInfo, ...] = ()
        self.ended = False
        self._group: Any = None
        self._actors: list[Any] = []
        self._sidecars: dict[str, Companion] = {}
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._failed = threading.Event()
        self.host = _driver_address()
        self._switchboard: Switchboard | None = None

    @classmethod
    def start(cls, shape: GangShape, *, timeout: float = WAIT_SECONDS, env: Mapping[str, str] | None = None) -> Gang:
        """Starts all the workers, or none; called in a connected Ray driver.

        Ranks follow the nodes: the head's workers first, then the other nodes' by name.

        Args:
            shape: Number and size of the workers.
            timeout: Seconds to wait for CPUs and GPUs that are in use.
            env: Environment variables for the workers, credentials among them.

        Returns:
            The gang, its workers alive and connected.

        Raises:
            CapacityError: If the active nodes can never hold it, or did not in time.
            WorkerLostError: If a worker died while it started.
        """
        gang = cls(shape)
        try:
            gang._reserve(time.monotonic() + timeout)
            gang._spawn(dict(env or {}))
        except BaseException:
            gang.end()
            raise
        return gang

    @property
    def sound(self) -> bool:
        """Whether it can be used: all its workers live, and nothing went wrong."""
        return (
            not self.ended
            and not self._failed.is_set()
            and self._switchboard is not None
            and len(self._switchboard.connected()) == self.shape.num_workers
        )

    def sidecar(self, name: str, make: Callable[[Callable[[str], None]], _C]) -> _C:
        """Something that ends with the gang; made once.

        Args:
            name: What it is kept under.
            make: Makes it; it gets a function to call, from any thread, when the thing fails, whereupon the gang does.

        Returns:
            The one made now or before.
        """
        if name not in self._sidecars:
            self._sidecars[name] = make(lambda what: self._note(_Cause(_Weight.COMPANION, TrainingError(what))))
        return self._sidecars[name]  # type: ignore[return-value]

    def preload(self, modules: Sequence[str]) -> None:
        """Has the workers import modules, without what they can do without; returns at once."""
        for actor in self._actors:
            actor.preload.remote(list(modules))

    def run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        *,
        timeout: float | None = None,
        on_note: OnNote | None = None,
    ) -> list[Any]:
        """Calls a function in every worker and waits for all.

        Args:
            function: What to call.
            args_per_rank: Its arguments, for each rank.
            timeout: Seconds that it may take; None: no limit.
            on_note: Called, in this thread, with rank and note, for each that a worker sends meanwhile.

        Returns:
            What each rank returned, by rank.

        Raises:
            WorkerLostError: If a worker's process or node was lost.
            ShoalError: The first cause of any other failure, naming the rank; the worker's traceback is in its notes.
                The gang has ended, and none of its processes is left.
        """
        if self.ended:
            raise TrainingError("this gang has ended")
        try:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            return self._run(function, args_per_rank, deadline, on_note)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kills the workers and sidecars, and returns when their processes have ended; safe to call again."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(Exception):
            # Ray may be shut down already, in which case the actors are, too.
            self._kill_actors()
        if self._switchboard is not None:
            self._hang_up(self._switchboard)
        for sidecar in self._sidecars.values():
            sidecar.close()

    def _hang_up(self, board: Switchboard) -> None:
        if not board.wait_all_gone(_KILL_SECONDS):
            # Of a node whose raylet is dead or stopped, Ray cannot kill the workers: they do it themselves.
            board.hang_up()
            if not board.wait_all_gone(_END_SECONDS):
                say(f"a worker of the gang of {self.shape} is out of reach: it ends itself when its host runs again")
        board.close()

    # Starting

    def _reserve(self, deadline: float) -> None:
        import ray
        from ray.util.placement_group import placement_group

        began = said = time.monotonic()
        self._refuse_if_impossible()
        self._group = placement_group(self.shape.bundles, strategy="STRICT_SPREAD" if self.shape.per_node else "SPREAD")
        # A free pool answers in 0.05 s, one whose last gang was just killed in up to 2 s; only who has to wait longer
        # is told.
        patience = _PATIENCE_SECONDS
        while not self._group.wait(timeout_seconds=max(0.0, min(patience, deadline - time.monotonic()))):
            # Nodes may leave while we wait.
            self._refuse_if_impossible()
            now = time.monotonic()
            free = ray.available_resources()
            state = f"{free.get('CPU', 0):g} of {ray.cluster_resources().get('CPU', 0):g} CPUs are free"
            if now >= deadline:
                raise CapacityError(
                    f"{self.shape} did not get their CPUs within {now - began:.0f} s ({state}): "
                    "wait for the other work on this pool to end, or add nodes with shoal.scale_cluster"
                )
            if patience == _PATIENCE_SECONDS or now - said >= _SAY_EVERY_SECONDS:
                said = now
                say(f"waiting for {self.shape}: {state}; giving up in {deadline - now:.0f} s")
            patience = _POLL_SECONDS

    def _refuse_if_impossible(self) -> None:
        nodes = cluster.total_resources()
        together = self.shape.per_node or 1
        bundle = self.shape.bundles[0]
        on_each = [
            min(math.floor(node.get(kind, 0.0) / amount + 1e-9) for kind, amount in bundle.items()) for node in nodes
        ]
        room = sum(min(1, fit) if self.shape.per_node else fit for fit in on_each) * together
        if room < self.shape.num_workers:
            cpus = sum(node.get("CPU", 0.0) for node in nodes)
            raise CapacityError(
                f"{self.shape} do not fit on this pool, which has room for {room} ({len(nodes)} nodes, {cpus:g} CPUs): "
                "add nodes with shoal.scale_cluster or ask for less"
            )

    def _spawn(self, env: dict[str, str]) -> None:
        import ray
        from ray.util.placement_group import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        order = cluster.node_order()
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        node_of: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        together = self.shape.per_node or 1
        bundles = [
            bundle
            for bundle in sorted(node_of, key=lambda bundle: (order.get(node_of[bundle], len(order)), bundle))
            for _ in range(together)
        ]
        on_node = Counter(node_of[bundle] for bundle in bundles)
        size = len(bundles)
        here = str(ray.get_runtime_context().get_node_id())
        board = Switchboard(_listen_on(self.host, here, node_of.values()), size, self._hear)
        self._switchboard = board
        actor_class = ray.remote(Worker)
        joins = []
        for rank, bundle in enumerate(bundles):
            actor = actor_class.options(
                num_cpus=max(self.shape.cpus_per_worker, _LEAST),
                num_gpus=self.shape.gpus_per_worker,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            ).remote()
            self._actors.append(actor)
            if self.shape.trim_memory:
                actor.spare.remote()
            place = Place(rank, size, on_node[node_of[bundle]], board.host, board.port, board.token)
            joins.append(actor.join.remote(place, env))
        infos = []
        deadline = time.monotonic() + _START_SECONDS
        for rank, (bundle, ref) in enumerate(zip(bundles, joins, strict=True)):
            node = names.get(node_of[bundle], node_of[bundle])
            try:
                infos.append(WorkerInfo(rank, node, ray.get(ref, timeout=max(0.1, deadline - time.monotonic()))))
            except ray.exceptions.GetTimeoutError:
                raise WorkerLostError(
                    f"rank {rank} (node {node}) did not start within {_START_SECONDS:.0f} s"
                ) from None
            except ray.exceptions.RayError as exc:
                raise WorkerLostError(
                    f"rank {rank} (node {node}) was lost while it started: {_first_line(exc)}"
                ) from exc
        self.workers = tuple(infos)
        # A worker's answer may be here before its hello, which another thread reads.
        if not board.wait_joined(size, max(0.1, deadline - time.monotonic())):
            raise WorkerLostError(
                f"a worker of the gang of {self.shape} could not connect to the driver at {board.host}"
            )

    # Running

    def _run(
        self,
        function: Callable[..., Any],
        args_per_rank: Sequence[Sequence[Any]],
        deadline: float,
        on_note: OnNote | None,
    ) -> list[Any]:
        import ray

        # Stored once, not once per rank.
        shared = ray.put(function)
        for rank, (actor, args) in enumerate(zip(self._actors, args_per_rank, strict=True)):
            future = actor.run.remote(shared, args).future()
            future.add_done_callback(lambda done, rank=rank: self._answered(rank, done))
        results: dict[int, Any] = {}
        talking = set(range(len(self._actors)))
        while talking or len(results) < len(self._actors):
            event = self._next(deadline)
            if event is None:
                raise TrainingError("the training did not end within its time limit (RunConfig.timeout)")
            if isinstance(event, _Done):
                talking.discard(event.rank)
            elif isinstance(event, _Answer):
                results[event.rank] = event.value
            elif isinstance(event, _Note):
                if on_note:
                    on_note(event.rank, event.note)
            else:
                raise self._first_cause(event)
        return [results[rank] for rank in range(len(self._actors))]

    def _first_cause(self, first: _Cause) -> ShoalError:
        """Listens for what explains the first failure: at most 5 s, and no longer than it takes to know."""
        began = time.monotonic()
        causes = [first]
        while all(cause.weight is not _Weight.STARVED for cause in causes):
            known = any(cause.weight is not _Weight.PEER for cause in causes)
            event = self._next(began + (_SETTLE_SECONDS if known else _EXPLAIN_SECONDS))
            if event is None:
                break
            if isinstance(event, _Cause):
                causes.append(event)
        # min() keeps the earliest of equals.
        return min(causes, key=lambda cause: cause.weight).error

    def _raised(self, rank: int, failure: Failure) -> _Cause:
        who = self._who(rank)
        error: ShoalError = TrainingError(f"{who} failed: {failure.summary}")
        if failure.error is not None:
            error = type(failure.error)(f"{failure.error} [{who}]")
        error.add_note(f"In {who}:\n{failure.traceback}")
        return _Cause(_Weight.PEER if isinstance(failure.error, PeerError) else _Weight.RAISED, error)

    def _answered(self, rank: int, future: Any) -> None:
        """Ray's thread: a worker's call ended, or the worker did."""
        exc = future.exception()
        if exc is None:
            outcome: Success | Failure = future.result()
            self._note(_Answer(rank, outcome.value) if isinstance(outcome, Success) else self._raised(rank, outcome))
        elif _is_out_of_memory(exc):
            error = WorkerLostError(
                f"{self._who(rank)} was killed because its node ran out of memory: "
                "use more nodes or larger ones, or fewer workers per node"
            )
            error.add_note(str(exc))
            self._note(_Cause(_Weight.STARVED, error))
        elif _is_death(exc):
            self._note(_Cause(_Weight.LOST, WorkerLostError(f"{self._who(rank)} was lost: {_first_line(exc)}")))
        else:
            # Such as a result that cannot be pickled: a task's error ends with what was raised.
            raised = str(exc).strip().splitlines()[-1]
            self._note(_Cause(_Weight.RAISED, TrainingError(f"{self._who(rank)} failed: {raised}")))

    def _hear(self, rank: int, kind: EventKind, text: str) -> None:
        """The switchboard's thread."""
        if kind is EventKind.LINE:
            # A line that this process cannot print, its output closed or in ASCII, is no reason to end a training run.
            with contextlib.suppress(OSError, ValueError):
                say(text)
        elif kind is EventKind.DONE:
            self._note(_Done(rank))
        elif kind is EventKind.NOTE:
            self._note(_Note(rank, json.loads(text)))
        elif not self.ended:
            self._note(_Cause(_Weight.LOST, WorkerLostError(f"{self._who(rank)} was lost: {text}")))

    def _note(self, event: _Event) -> None:
        if isinstance(event, _Cause):
            self._failed.set()
        self._events.put(event)

    def _next(self, deadline: float) -> _Event | None:
        """The next event; None when the deadline has passed."""
        try:
            wait = deadline - time.monotonic()
            return self._events.get(timeout=None if wait == math.inf else max(0.0, wait))
        except queue.Empty:
            return None

    def _who(self, rank: int) -> str:
        return str(self.workers[rank]) if rank < len(self.workers) else f"rank {rank}"

    def _kill_actors(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            # Frees the CPUs, and has the raylets kill whatever process still runs on them.
            remove_placement_group(self._group)


def _driver_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _listen_on(address: str, node: str, workers_nodes: Iterable[str]) -> str:
    """The address for a gang's lifelines: loopback where all workers are on the driver's own node.

    Args:
        address: The driver's address, which the other nodes reach.
        node: Ray's id of the driver's node.
        workers_nodes: Those of the workers' nodes.
    """
    return "127.0.0.1" if set(workers_nodes) == {node} else address


def _is_out_of_memory(exc: BaseException) -> bool:
    """Whether Ray's memory monitor killed the worker; of an actor, only the exit type in the text says so."""
    import ray

    return isinstance(exc, ray.exceptions.OutOfMemoryError) or (_is_death(exc) and "NODE_OUT_OF_MEMORY" in str(exc))


def _is_death(exc: BaseException) -> bool:
    import ray

    deaths = ray.exceptions.RayActorError | ray.exceptions.NodeDiedError | ray.exceptions.WorkerCrashedError
    return isinstance(exc, deaths)


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
