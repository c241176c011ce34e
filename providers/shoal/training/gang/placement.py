"""Place the workers of a gang on nodes: reserve the resources of all workers together, and number the ranks.

Resources are reserved in a Ray placement group, or on a pool without Ray in the pool's register of nodes."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from shoal.errors import CapacityError, CapacityTimeoutError
from shoal.lazy_imports import ray
from shoal.node_register import NodeRegister, RegisteredNode
from shoal.training import cluster
from shoal.training.cluster import resources
from shoal.training.reporting import say
from shoal.training.timeouts import FIRST_WAIT_MESSAGE_S, WAIT_MESSAGE_PERIOD_S

_T = TypeVar("_T")

_POLL_SECONDS = 2.0
_GPU_TYPE_SHARE = 0.001
_ONE_BYTE = {"memory": 1.0}
"""Resources of a worker without CPUs and GPUs. Ray does not accept a placement group bundle without any resource, and a
part of a CPU would be missing for work that needs all CPUs of the node."""


@dataclass(frozen=True, slots=True)
class GangShape:
    """Number of workers of a gang, and the resources of each, resolved once per attempt from what a job demands.

    A gang is reused only for a run with an equal shape.

    Args:
        cpus_per_worker: CPUs that each worker reserves; may be a fraction, of which a pool without Ray drops the part
            after the point.
        gpu_type: Required type of GPU; None accepts any type.
        per_node: Number of workers on each node; each group of `per_node` workers gets a node of its own. None places
            workers wherever there is room.
        trim_memory: Whether the workers return freed memory to the operating system at once, so that another library in
            the process can use it. Libraries that free and allocate memory all the time become slower.
        reading_cpus: CPUs of each worker that stay free for the tasks of Ray Data that read its rows.
        joined: Number of workers in whose place one process trains, with the reserved CPUs of all of them.
    """

    num_workers: int
    cpus_per_worker: float
    gpus_per_worker: int = 0
    gpu_type: str | None = None
    per_node: int | None = None
    trim_memory: bool = False
    reading_cpus: float = field(default=0.0, compare=False)
    joined: int = 1

    @property
    def threads(self) -> int:
        """Number of threads with which each worker computes."""
        return max(1, int(self.cpus_per_worker) * self.joined)

    def as_one_worker(self) -> GangShape:
        """Return the shape of one worker that uses the CPUs of all workers, which must be on one host."""
        return replace(self, num_workers=1, joined=self.num_workers)

    def __str__(self) -> str:
        each = resources(self.cpus_per_worker * self.joined, self.gpus_per_worker, self.gpu_type)
        return f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'} of {each}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources that each placement group bundle reserves: for one worker or, with `per_node`, for one node."""
        together = self.per_node or 1
        gpus = {"GPU": float(self.gpus_per_worker * together)} if self.gpus_per_worker else {}
        if self.gpu_type:
            # Ray defines a resource for the GPU type, and each node has exactly 1 of it, however many GPUs it has.
            # Each worker reserves a very small part, so that all workers of the node can share this resource.
            gpus[cluster.GPU_TYPE + self.gpu_type] = _GPU_TYPE_SHARE
        cpus = {"CPU": self.cpus_per_worker * together} if self.cpus_per_worker else {}
        return [(cpus | gpus) or _ONE_BYTE] * (self.num_workers * self.joined // together)


@dataclass(frozen=True, slots=True)
class Seat:
    """Placement of one worker.

    Args:
        bundle: Index of the placement group's bundle; without Ray, of the group of workers that share a node.
        node_id: Id of the node: Ray's, or without Ray that of the node's row.
        local_world_size: Number of workers on the node.
    """

    bundle: int
    node_id: str
    node: str
    local_world_size: int


def reserve(shape: GangShape, deadline: float) -> Any:
    """Reserve the resources of all workers together in a Ray placement group; if one worker does not fit, reserve none.

    Returns:
        A ready placement group with the bundles of `shape`; pass it to :func:`release` at the end.

    Raises:
        CapacityError: The active nodes are too small for the gang, or the function that calls holds their resources.
        CapacityTimeoutError: The nodes had no free room before the deadline.
    """
    refuse_if_impossible(shape)
    group = ray.util.placement_group(shape.bundles, strategy="STRICT_SPREAD" if shape.per_node else "SPREAD")
    try:
        return wait_for_room(shape, lambda seconds: group if group.wait(timeout_seconds=seconds) else None, deadline)
    except BaseException:
        with contextlib.suppress(Exception):
            # release() fails if Ray is shut down already. The error is ignored, because the reservation has ended too.
            release(group)
        raise


def wait_for_room(shape: GangShape, reserved: Callable[[float], _T | None], deadline: float) -> _T:
    """Wait until the resources of a gang are reserved, and return the reservation.

    Args:
        reserved: Function that waits for the reservation, for the given number of seconds at most, and returns it; None
            if it was not made.
        deadline: Time until which to wait, from `time.monotonic`.

    Raises:
        CapacityError: The active nodes are too small for the gang.
        CapacityTimeoutError: The nodes had no free room before the deadline.
    """
    began = said = time.monotonic()
    pause = FIRST_WAIT_MESSAGE_S
    while (made := reserved(max(0.0, min(pause, deadline - time.monotonic())))) is None:
        # Nodes may leave the pool during the wait, so check again whether the gang fits on the remaining nodes.
        refuse_if_impossible(shape)
        now = time.monotonic()
        state = "{:g} of {:g} CPUs are free".format(*cluster.free_and_all_cpus())
        if now >= deadline:
            raise CapacityTimeoutError(
                f"{shape} did not get the resources within {now - began:.0f} s ({state}): "
                "wait for the other work on this pool to end, or add nodes with shoal.scale_cluster"
            )
        if pause == FIRST_WAIT_MESSAGE_S or now - said >= WAIT_MESSAGE_PERIOD_S:
            said = now
            say(f"waiting for {shape}: {state}; giving up in {deadline - now:.0f} s")
        pause = _POLL_SECONDS
    return made


def refuse_if_impossible(shape: GangShape) -> None:
    """Raise CapacityError if a gang would not fit on this cluster's nodes even if nothing else ran on them."""
    nodes = cluster.total_resources()
    fitting = room(shape, list(nodes.values()))
    if fitting < shape.num_workers:
        cpus = sum(node.get("CPU", 0.0) for node in nodes.values())
        raise CapacityError(
            f"{shape} do not fit on this pool, which has room for {fitting} of them ({len(nodes)} nodes, "
            f"{cpus:g} CPUs): add nodes with shoal.scale_cluster, or request fewer or smaller workers"
        )
    held = _held_by_caller()
    remaining = [
        {name: amount - held.get(node_id, {}).get(name, 0.0) for name, amount in node.items()}
        for node_id, node in nodes.items()
    ]
    left = room(shape, remaining)
    if left < shape.num_workers:
        kept = resources(
            sum(each.get("CPU", 0.0) for each in held.values()),
            int(sum(each.get("GPU", 0.0) for each in held.values())),
        )
        raise CapacityError(
            f"{shape} do not fit beside the function that starts them, which holds {kept} itself until it returns "
            f"(room for {left} of them is left): reserve no CPUs for the function (num_cpus=0), add nodes with "
            "shoal.scale_cluster, or request fewer or smaller workers"
        )


def _held_by_caller() -> Mapping[str, Mapping[str, float]]:
    """Return the resources that this process holds, by Ray's node id: those of the whole gang if it is a worker of one,
    because a gang ends as a whole. A process that is not a worker of Ray holds nothing."""
    if (ray := cluster.ray_if_connected()) is None:
        return {}
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return {}
    group = ray.util.get_current_placement_group()
    if group is None:
        return {context.get_node_id(): context.get_assigned_resources()}
    held: dict[str, Counter[str]] = {}
    table = ray.util.placement_group_table(group)
    for bundle, node_id in table["bundles_to_node_id"].items():
        held.setdefault(node_id, Counter()).update(table["bundles"][bundle])
    return held


def room(shape: GangShape, nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many of a gang's workers fit on nodes with these resources (name -> amount)."""
    bundle = shape.bundles[0]
    on_each = [
        min(math.floor(node.get(kind, 0.0) / amount + 1e-9) for kind, amount in bundle.items()) for node in nodes
    ]
    return sum(min(1, fit) if shape.per_node else fit for fit in on_each) * (shape.per_node or 1) // shape.joined


def seats(shape: GangShape, group: Any) -> list[Seat]:
    """Return the placement of each worker, ordered by rank: first the workers on the head node, then all others."""
    order = {node_id: place for place, node_id in enumerate(cluster.node_names())}
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    node_of: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundles = [
        bundle
        for bundle in sorted(node_of, key=lambda bundle: (order.get(node_of[bundle], len(order)), bundle))
        for _ in range(shape.per_node or 1)
    ]
    on_node = Counter(node_of[bundle] for bundle in bundles)
    return [
        Seat(bundle, node_id, names.get(node_id, node_id), on_node[node_id])
        for bundle, node_id in ((bundle, node_of[bundle]) for bundle in bundles)
    ]


def release(group: Any) -> None:
    """Free the resources of a placement group; Ray then kills its actors that still use these resources."""
    if ray.is_initialized():
        ray.util.remove_placement_group(group)


_LOOK_PERIOD_S = 0.1


class Reservation(NamedTuple):
    """Reserved CPUs of a gang. `release` frees the CPUs; further calls of it have no effect."""

    seats: Sequence[Seat]
    nodes: Sequence[RegisteredNode]
    release: Callable[[], None]


def reserve_in_register(shape: GangShape, register: NodeRegister, deadline: float) -> Reservation:
    """Reserve the CPUs of all workers together; if one worker does not fit, reserve none.

    Raises:
        CapacityError: The active nodes are too small for the gang.
        CapacityTimeoutError: The nodes had no free room before the deadline.
    """
    refuse_if_impossible(shape)

    def reserved(seconds: float) -> Reservation | None:
        until = time.monotonic() + seconds
        while (made := _try_to_reserve(shape, register)) is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_PERIOD_S))
        return made

    return wait_for_room(shape, reserved, deadline)


def choose(shape: GangShape, free: Sequence[int]) -> list[int] | None:
    """Choose a node for each group of workers that share a node (for each worker, if `per_node` is None). The groups
    are spread over the nodes, as Ray spreads them; with `per_node`, each gets a node of its own.

    Returns:
        The index of the node for each group, in ascending order; None if the free CPUs do not suffice.
    """
    each = int(shape.cpus_per_worker) * (shape.per_node or 1)
    on_node = [0] * len(free)
    for _ in shape.bundles:
        fitting = [
            node
            for node, cpus in enumerate(free)
            if cpus >= each * (on_node[node] + 1) and not (shape.per_node and on_node[node])
        ]
        if not fitting:
            return None
        on_node[min(fitting, key=lambda node: (on_node[node], node))] += 1
    return [node for node, number in enumerate(on_node) for _ in range(number)]


def _try_to_reserve(shape: GangShape, register: NodeRegister) -> Reservation | None:
    with register.reserving() as mine, contextlib.ExitStack() as kept:
        if not mine:
            return None
        nodes = [node for node in register.nodes() if not register.is_leaving(node.id)]
        chosen = choose(shape, [register.free_cpus(node) for node in nodes])
        if chosen is None:
            return None
        together = shape.per_node or 1
        on_node = Counter(chosen)
        for node, bundles in on_node.items():
            descriptor = register.reserve(nodes[node], int(shape.cpus_per_worker) * together * bundles)
            if descriptor is None:  # the node has just ended
                return None
            kept.callback(os.close, descriptor)
        release = kept.pop_all().close
    seats = [
        Seat(bundle, nodes[node].id, nodes[node].name, on_node[node] * together)
        for bundle, node in enumerate(chosen)
        for _ in range(together)
    ]
    return Reservation(seats, [nodes[node] for node in on_node], release)


_lock = threading.Lock()
_nodes_of_gangs: dict[object, frozenset[str]] = {}
_changed_at = time.monotonic()


def record_nodes(gang: object, nodes: Iterable[str]) -> None:
    """Record the nodes on which a gang has workers. `nodes` is empty if the gang has ended."""
    global _changed_at
    with _lock:
        before = _count()
        _nodes_of_gangs[gang] = frozenset(nodes)
        if not _nodes_of_gangs[gang]:
            del _nodes_of_gangs[gang]
        if _count() != before:
            _changed_at = time.monotonic()


def nodes_in_use() -> tuple[int, float]:
    """Return the number of nodes on which this process has workers, and the seconds since this number last changed."""
    with _lock:
        return _count(), time.monotonic() - _changed_at


def _count() -> int:
    return len(frozenset().union(*_nodes_of_gangs.values()))
