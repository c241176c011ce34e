"""Decide which waiting jobs of a pool start next, and refuse those that its nodes can never run.

The functions only compute, and do not read or write the store.

A pool runs as many jobs at a time as it has room for. The first waiting job always starts if no
other job runs, even if the job needs more than the pool has. No job overtakes the first waiting job, so that small jobs
cannot keep a large one waiting for ever, except jobs without workers, such as plans of the size of the pool.

Jobs with higher priority come first. Among equal priorities, the holder (the run that submitted the job) with the
fewest running jobs comes first, and among the jobs of one holder the oldest job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError
from shoal.pool.backends import backend_of
from shoal.pool.spec import PoolSpec
from shoal.training.demand import GangClaim, GangDemand, NodeSize, total_size

if TYPE_CHECKING:
    from shoal.jobs.spec import AnyJobSpec


@dataclass(frozen=True)
class Entry:
    """One attempt of a job that runs or waits on a pool, with the fields that decide when the attempt starts.

    Attributes:
        key: Id of the job and number of the attempt, which together identify this entry.
        holder: Name of the run that submitted the job.
        priority: Priority of the job.
        queued_at: Time when the attempt joined the queue.
        waits: Whether the attempt waits. False: its driver runs or is about to run.
        gang: The workers that the job asks for.
        most_nodes: Largest number of nodes that the job uses if it asks for all nodes. None: no limit.
    """

    key: tuple[str, int]
    holder: str
    priority: int
    queued_at: float
    waits: bool
    gang: GangClaim
    most_nodes: int | None = None


@dataclass(frozen=True)
class Place:
    """Position of a waiting attempt in its pool's queue, and the numbers of attempts that wait and run on the pool.

    Attributes:
        position: Position of the attempt in the queue, 1 for the attempt that starts next.
        waiting: Number of attempts that wait on the pool.
        running: Number of attempts that run on the pool.
    """

    position: int
    waiting: int
    running: int

    def __str__(self) -> str:
        run = "1 job runs" if self.running == 1 else f"{self.running} jobs run"
        return f"position {self.position} of {self.waiting} in the queue, {run}"


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the waiting attempts of a pool in the order in which they start, the highest priority first.

    Among attempts of equal priority, the submitters, such as DAG runs, take turns: each time, the next attempt is the
    oldest one of the holder with the fewest running jobs.
    """
    entries = list(entries)
    running = Counter(entry.holder for entry in entries if not entry.waits)
    waiting = [entry for entry in entries if entry.waits]
    placed = []
    for entry in sorted(waiting, key=lambda entry: (-entry.priority, entry.queued_at, entry.key)):
        placed.append((-entry.priority, running[entry.holder], entry.queued_at, entry.key, entry))
        running[entry.holder] += 1
    return [place[-1] for place in sorted(placed, key=lambda place: place[:-1])]


def next_up(entries: Iterable[Entry], room: Room) -> list[Entry]:
    """Return the waiting attempts for which the pool has room now, in the order in which they start."""
    entries = list(entries)
    total = total_size(room.nodes)
    claim = cache(lambda gang, most_nodes: gang.claim(room.nodes, most_nodes))  # thousands of jobs ask for the same
    taken = total_size(claim(entry.gang, entry.most_nodes) for entry in entries if not entry.waits)
    begun = sum(not entry.waits for entry in entries)
    chosen: list[Entry] = []
    is_full = False
    for entry in in_order(entries):
        if room.drivers is not None and begun + len(chosen) >= max(1, room.drivers):
            break
        if entry.gang.workers and is_full:
            continue
        needed = total_size([taken, claim(entry.gang, entry.most_nodes)])
        if entry.gang.workers and begun + len(chosen) and (needed.cpus > total.cpus or needed.gpus > total.gpus):
            is_full = True
            continue
        taken = needed
        chosen.append(entry)
    return chosen


DRIVER_BYTES = 400 * 2**20
"""Bytes of the head's memory that are reserved for one driver."""

_DRIVERS_SHARE = 4
"""Share of the head's memory for drivers is 1/4. The rest is for workers, the object store and Ray."""


def refuse_without_ray(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job that needs Ray on a pool without Ray."""
    if not pool.ray and spec.demand().needs_ray:
        raise InvalidArgumentError(
            f'pool "{pool.name}" runs without Ray (ray=false), but this job needs Ray: name another pool. The options '
            "run_config.packages, run_config.code and tracking.system_metrics, GPUs, Ray Data and functions that start "
            "Ray tasks need Ray"
        )


def refuse_too_many_workers(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job whose workers do not fit on a pool even if the pool has its largest number of nodes.

    The nodes of an existing Ray cluster may be larger than the pool's spec says, and the number of GPUs of a node is
    not known if a node takes all of its machine. For such pools, the job's driver decides.
    """
    if not backend_of(pool).has_exact_nodes or pool.gpus_per_node < 0:
        return
    if not spec.demand().could_fit(NodeSize(pool.cpus_per_node, pool.gpus_per_node), pool.max_nodes):
        config = getattr(spec, "room_for", None) or spec.scaling_config
        raise InvalidArgumentError(
            f'the workers ({config.model_dump(exclude_defaults=True)}) do not fit on pool "{pool.name}", which has at '
            f"most {pool.max_nodes} node(s) with {pool.cpus_per_node} CPU(s) and {pool.gpus_per_node} GPU(s) each: "
            "request fewer or smaller workers, raise max_nodes, cpus_per_node or gpus_per_node of the pool, or set "
            "run_config.clamp to reduce such requests automatically"
        )


def fewest_nodes(demand: GangDemand, pool: PoolSpec) -> int:
    """Return the smallest number of a pool's nodes on which a job's workers fit, at most its largest number; at least
    the pool's smallest number, and 1."""
    if pool.gpus_per_node < 0 and demand.gang.gpus:
        return max(1, pool.min_nodes)  # the first node gets all GPUs of the machine
    node = NodeSize(pool.cpus_per_node, max(0, pool.gpus_per_node))
    sizes = range(max(1, pool.min_nodes), pool.max_nodes)
    return next((size for size in sizes if demand.could_fit(node, size, clamp=False)), pool.max_nodes)


@dataclass(frozen=True)
class Room:
    """Limits on the jobs that run at the same time on one pool.

    Attributes:
        drivers: Largest number of drivers that may run at the same time; None: not limited.
        nodes: The ready nodes; if there are none, CPUs and GPUs do not limit the number of jobs.
    """

    drivers: int | None
    nodes: tuple[NodeSize, ...]


def drivers_in(memory_bytes: int) -> int:
    """Return how many drivers may run at the same time on a head with the given memory; at least 1."""
    return max(1, memory_bytes // _DRIVERS_SHARE // DRIVER_BYTES)
