"""Run the workers of a gang as Ray actors on the resources that a Ray placement group reserves for the gang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from shoal.errors import WorkerLostError
from shoal.lazy_imports import ray
from shoal.training.gang import placement
from shoal.training.gang.placement import GangShape, Seat
from shoal.training.gang.worker import Answered, Failure, Joined, Lost, Place, Worker, Workers
from shoal.training.host import own_process
from shoal.training.timeouts import REMOVE_FOLDERS_S


class RayActors(Workers):
    """Workers that are Ray actors. The constructor reserves the resources of all workers, or raises an error.

    Raises:
        CapacityError: The active nodes are too small for the gang, or had no free room in time.
    """

    def __init__(self, shape: GangShape, deadline: float) -> None:
        self._shape = shape
        self._actor_class = ray.remote(Worker)
        self._actors: dict[int, Any] = {}
        self._own_folders: dict[str, str] = {}
        self._group = placement.reserve(shape, deadline)
        try:
            self.seats: Sequence[Seat] = placement.seats(shape, self._group)
            self.host = str(ray.util.get_node_ip_address())
            here = str(ray.get_runtime_context().get_node_id())
            self.listen_host = _listen_on(self.host, here, (seat.node_id for seat in self.seats))
        except BaseException:
            self.kill()
            raise

    def _begin(self, place: Place, env: Mapping[str, str]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = self._actor_class.options(
            num_cpus=self._shape.cpus_per_worker,
            num_gpus=self._shape.gpus_per_worker,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self.seats[place.rank].bundle),
        )
        self._actors[place.rank] = actor = actor_class.remote()
        if self._shape.trim_memory:
            actor.trim_memory.remote()
        return actor.join.remote(place, env)

    def _end(self, rank: int) -> None:
        ray.kill(self._actors[rank], no_restart=True)

    def _joined(self, rank: int, join: Any, left: float, timeout: float) -> Joined:
        seat = self.seats[rank]
        try:
            joined: Joined = ray.get(join, timeout=max(0.1, left))
        except ray.exceptions.GetTimeoutError:
            raise WorkerLostError(f"rank {rank} (node {seat.node}) did not start within {timeout:.0f} s") from None
        except ray.exceptions.RayError as exc:
            raise WorkerLostError(
                f"rank {rank} (node {seat.node}) was lost while it started: {_first_line(exc)}"
            ) from exc
        if joined.own_folder:
            self._own_folders[seat.node_id] = joined.own_folder
        return joined

    def preload(self, modules: Sequence[str], complete: bool, ranks: Iterable[int]) -> None:
        """Tell the workers of these ranks to import modules before their next call."""
        for rank in ranks:
            self._actors[rank].preload.remote(list(modules), complete)

    def run(self, function: Callable[..., Any], args_by_rank: Mapping[int, Sequence[Any]], answered: Answered) -> None:
        """Start a call in the workers of these ranks, and return without waiting."""
        # put() stores the pickled function once in Ray's object store. Without put(), Ray would store the function once
        # per rank.
        shared = ray.put(function)
        for rank, args in args_by_rank.items():
            future = self._actors[rank].run.remote(shared, args).future()
            future.add_done_callback(partial(_pass_on, answered, rank))

    def kill(self) -> None:
        """Kill the actors, and free their resources."""
        if not ray.is_initialized():
            return
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        placement.release(self._group)

    def clean_up(self) -> None:
        """Remove the temporary working folders of actors that have ended."""
        own_process.remove_from_nodes(self._own_folders, REMOVE_FOLDERS_S)


def _pass_on(answered: Answered, rank: int, future: Any) -> None:
    """Report the outcome of a worker's call; Ray calls this function in another thread."""
    exc = future.exception()
    if exc is None:
        answered(rank, future.result())
    # For an actor, Ray reports the lack of memory only in the text of the error, so the text is searched.
    elif isinstance(exc, ray.exceptions.OutOfMemoryError) or (_is_death(exc) and "NODE_OUT_OF_MEMORY" in str(exc)):
        answered(rank, Lost("", out_of_memory=str(exc)))
    elif _is_death(exc):
        answered(rank, Lost(_first_line(exc)))
    else:
        # Ray could not return the result, for example because it cannot be pickled. The last line of Ray's error
        # message contains the original error.
        answered(rank, Failure(str(exc).strip().splitlines()[-1], str(exc), None))


def _listen_on(address: str, node: str, workers_nodes: Iterable[str]) -> str:
    """Return the address at which the driver accepts workers: 127.0.0.1 if all workers run on the driver's node,
    else `address`.
    """
    return "127.0.0.1" if set(workers_nodes) == {node} else address


def _is_death(exc: BaseException) -> bool:
    deaths = ray.exceptions.RayActorError | ray.exceptions.NodeDiedError | ray.exceptions.WorkerCrashedError
    return isinstance(exc, deaths)


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
