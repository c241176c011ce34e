"""Say what a job needs of its pool, and decide which waiting jobs of a pool start next.

The functions only compute, and do not read or write the store.

A pool runs as many jobs at a time as it has room for. The first waiting job always starts if no
other job runs, even if the job needs more than the pool has. No job overtakes the first waiting job, so that small jobs
cannot keep a large one waiting for ever.

Jobs with higher priority come first. Among equal priorities, the holder (the run that submitted the job) with the
fewest running jobs comes first, and among the jobs of one holder the oldest job.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.jobs.specs.function import AnyJobSpec, FunctionJobSpec
from shoal.jobs.specs.partitions import PartitionsJobSpec
from shoal.jobs.specs.tuning import TuneJobSpec
from shoal.pool.spec import PoolSpec
from shoal.training.boosting.request import TrainRequest
from shoal.training.cluster import Node, limited_nodes
from shoal.training.pytorch.request import FunctionRequest, PyTorchScalingConfig, lay_out, needed_cpus
from shoal.training.scaling import gpu_wish, resolve_size


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
    gang: Gang
    most_nodes: int | None = None

    def claim(self, nodes: Sequence[NodeSize]) -> NodeSize:
        """Return how many of the nodes' CPUs and GPUs the job needs."""
        return self.gang.claim(nodes, self.most_nodes)


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
    """Return the waiting attempts of a pool in the order in which they start, the highest priority first."""
    entries = list(entries)
    running = Counter(entry.holder for entry in entries if not entry.waits)
    waiting = sorted((entry for entry in entries if entry.waits), key=lambda entry: -entry.priority)
    ordered: list[Entry] = []
    for _, equals in groupby(waiting, key=lambda entry: entry.priority):
        ordered += _in_turns(equals, running)
    return ordered


def next_up(entries: Iterable[Entry], room: Room) -> list[Entry]:
    """Return the waiting attempts for which the pool has room now, in the order in which they start."""
    entries = list(entries)
    total = total_size(room.nodes)
    claims = [entry.claim(room.nodes) for entry in entries if not entry.waits]
    chosen: list[Entry] = []
    for entry in in_order(entries):
        if room.drivers is not None and len(claims) >= max(1, room.drivers):
            break
        claims.append(entry.claim(room.nodes))
        taken = total_size(claims)
        if len(claims) > 1 and (taken.cpus > total.cpus or taken.gpus > total.gpus):
            break
        chosen.append(entry)
    return chosen


def _in_turns(equals: Iterable[Entry], running: Counter[str]) -> Iterable[Entry]:
    """Yield waiting attempts of equal priority in the order in which they start. Their submitters, such as DAG runs,
    take turns.

    Each time, the next attempt is the oldest one of the holder with the fewest running jobs.
    """
    lines: dict[str, list[Entry]] = {}
    for entry in sorted(equals, key=lambda entry: (entry.queued_at, entry.key), reverse=True):
        # Each list begins with the newest attempt, so that `list.pop` takes the oldest attempt.
        lines.setdefault(entry.holder, []).append(entry)

    def turn(holder: str) -> tuple[int, float, tuple[str, int], str]:
        first = lines[holder][-1]
        return running[holder], first.queued_at, first.key, holder

    turns = [turn(holder) for holder in lines]
    heapq.heapify(turns)
    while turns:
        *_, holder = heapq.heappop(turns)
        yield lines[holder].pop()
        running[holder] += 1
        if lines[holder]:
            heapq.heappush(turns, turn(holder))


DRIVER_BYTES = 400 * 2**20
"""Bytes of the head's memory that are reserved for one driver."""

_DRIVERS_SHARE = 4
"""Share of the head's memory for drivers is 1/4. The rest is for workers, the object store and Ray."""


class NodeSize(NamedTuple):
    """CPUs and GPUs of one ready node."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Gang:
    """Group of workers that a job asks for. The number of workers is fixed, or depends on the pool's nodes or GPUs.

    Attributes:
        workers: Number of workers; a negative number -n means n workers on each node.
        cpus: CPUs of each worker and of Ray Data's tasks that read its rows; -1: all CPUs of a node, divided among its
            workers.
        gpus: GPUs of each worker; -1: one GPU if every node has a GPU, otherwise none.
        per_gpu: Whether a negative `workers` means one worker per GPU if the workers use GPUs.
    """

    workers: int = -1
    cpus: float = -1
    gpus: int = 0
    per_gpu: bool = False

    @classmethod
    def of(cls, spec: AnyJobSpec | TrainRequest | FunctionRequest) -> Self:
        """Return the group of workers for a job's spec, or for the request that an estimator or distributor creates."""
        if isinstance(spec, FunctionRequest):
            return cls._of_function(spec)
        if isinstance(spec, PartitionsJobSpec) and spec.scaling_config.num_workers == -1:
            return cls()  # as many workers as have room
        # None means that the job uses GPUs if every node has a GPU. Predictions never use GPUs, and LightGBM uses GPUs
        # only if its options ask for them.
        # The workers of a search use them as a training does.
        uses_gpu: bool | None = False
        train = spec.train if isinstance(spec, TuneJobSpec) else spec
        if isinstance(train, TrainRequest):
            # Imported late, because most processes that read the queue submit no training.
            from shoal.training.boosting.engine import interface_of

            uses_gpu = gpu_wish(spec.scaling_config, interface_of(train.framework).device(train))
            if uses_gpu is None and train.framework == "lightgbm":
                uses_gpu = False
        elif isinstance(spec, TuneJobSpec):
            uses_gpu = bool(spec.scaling_config.use_gpu)
        gpus = -1 if uses_gpu is None else int(uses_gpu)
        return cls(spec.scaling_config.num_workers, spec.scaling_config.num_cpu_per_worker, gpus, per_gpu=True)

    @classmethod
    def _of_function(cls, spec: FunctionRequest) -> Self:
        # If the function starts further workers itself, the spec's `room_for` gives their number and size. In that case
        # only the further workers are counted, because the workers that call the function only wait for them and need
        # almost no resources.
        config = spec.room_for or spec.scaling_config
        each = config.resource_requirements_per_worker
        cpus = needed_cpus(each, 0 if spec.room_for else spec.ray_streams)
        if not isinstance(config, PyTorchScalingConfig):
            return cls(config.num_workers, cpus, each.num_gpus)
        per_node = config.num_workers_per_node
        if per_node == -1:
            return cls(-1, cpus, each.num_gpus, per_gpu=True)
        workers = -per_node if config.num_nodes == -1 else config.num_nodes * per_node
        return cls(workers, cpus, each.num_gpus)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the group of workers as plain data, which the job's row stores."""
        return asdict(self)

    def claim(self, nodes: Sequence[NodeSize], most_nodes: int | None = None) -> NodeSize:
        """Return how many CPUs and GPUs the workers need in total, but at most as many as the given nodes have.

        If the number of workers depends on the nodes, at most `most_nodes` nodes count.
        """
        gpus = self.gpus if self.gpus >= 0 else int(all(node.gpus for node in nodes))
        if self.workers < 0:
            nodes = limited_nodes(nodes, most_nodes, lambda node: node.cpus)
        total = total_size(nodes)
        workers = self.workers
        if workers < 0:
            workers = total.gpus if self.per_gpu and gpus else -workers * len(nodes)
        cpus = math.ceil(workers * self.cpus) if self.cpus >= 0 else total.cpus * workers // max(1, len(nodes))
        return NodeSize(min(cpus, total.cpus), min(workers * gpus, total.gpus))


def needs_ray(spec: AnyJobSpec | TrainRequest | FunctionRequest) -> bool:
    """Return whether a job can run only on a pool with Ray.

    A job needs Ray if it has its own packages or code, if it uses GPUs, if it reads rows with Ray Data, or if its
    function starts Ray tasks. Whether a function calls Ray otherwise is not known.
    """
    gang = Gang.of(spec)
    if spec.run_config.packages or spec.run_config.code or gang.gpus > 0:
        return True
    if isinstance(spec, FunctionRequest):
        tracking = spec.tracking if isinstance(spec, FunctionJobSpec) else None
        if spec.room_for or (tracking and tracking.system_metrics):
            return True
        datasets = list(spec.dataset_map.values())
    elif isinstance(spec, TuneJobSpec):
        datasets = list(spec.inputs())
    else:
        datasets = [spec.dataset, *(spec.eval_set.values() if isinstance(spec, TrainRequest) else ())]
    return any(each.ingester == "ray" for each in datasets)


def refuse_without_ray(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job that needs Ray on a pool without Ray.

    Raises:
        InvalidArgumentError: The pool runs without Ray, and the job needs it.
    """
    if not pool.ray and needs_ray(spec):
        raise InvalidArgumentError(
            f'pool "{pool.name}" runs without Ray (ray=false), but this job needs Ray: name another pool. The options '
            "run_config.packages, run_config.code and tracking.system_metrics, GPUs, Ray Data and functions that start "
            "Ray tasks need Ray"
        )


def refuse_too_many_workers(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job whose workers do not fit on a pool even if the pool has its largest number of nodes.

    The nodes of an existing Ray cluster may be larger than the pool's spec says, and the number of GPUs of a node is
    not known if a node takes all of its machine. For such pools, the job's driver decides.

    Raises:
        InvalidArgumentError: The workers do not fit.
    """
    if pool.backend != "local" or pool.gpus_per_node < 0:
        return
    if not could_fit(spec, NodeSize(pool.cpus_per_node, pool.gpus_per_node), pool.max_nodes):
        config = (isinstance(spec, FunctionRequest) and spec.room_for) or spec.scaling_config
        raise InvalidArgumentError(
            f'the workers ({config.model_dump(exclude_defaults=True)}) do not fit on pool "{pool.name}", which has at '
            f"most {pool.max_nodes} node(s) with {pool.cpus_per_node} CPU(s) and {pool.gpus_per_node} GPU(s) each: "
            "request fewer or smaller workers, raise max_nodes, cpus_per_node or gpus_per_node of the pool, or set "
            "run_config.clamp to reduce such requests automatically"
        )


def could_fit(spec: AnyJobSpec | TrainRequest | FunctionRequest, node: NodeSize, max_nodes: int) -> bool:
    """Return whether a job's workers would fit on a pool with this number of equal nodes."""
    nodes, clamp = [Node(name="", cpus=node.cpus, gpus=node.gpus)] * max_nodes, spec.run_config.clamp
    with warnings.catch_warnings(action="ignore"):
        try:
            if isinstance(spec, FunctionRequest):
                lay_out(spec.scaling_config, nodes, ray_streams=spec.ray_streams, clamp=clamp)
                if spec.room_for is not None:
                    lay_out(spec.room_for, nodes, clamp=clamp)
            else:
                use_gpu = {0: False, 1: True}.get(Gang.of(spec).gpus)
                trained = spec.train if isinstance(spec, TuneJobSpec) else None
                for sized in (spec.scaling_config, *([trained.scaling_config] if trained else [])):
                    resolve_size(sized.model_copy(update={"use_gpu": use_gpu}), nodes, clamp=clamp)
        except CapacityError:
            return False
    return True


def fewest_nodes(spec: AnyJobSpec | TrainRequest | FunctionRequest, pool: PoolSpec) -> int:
    """Return the smallest number of a pool's nodes on which a job's workers fit, at most its largest number; at least
    the pool's smallest number, and 1."""
    if pool.gpus_per_node < 0 and Gang.of(spec).gpus:
        return max(1, pool.min_nodes)  # the first node gets all GPUs of the machine
    unclamped = spec.model_copy(update={"run_config": spec.run_config.model_copy(update={"clamp": False})})
    node = NodeSize(pool.cpus_per_node, max(0, pool.gpus_per_node))
    sizes = range(max(1, pool.min_nodes), pool.max_nodes)
    return next((size for size in sizes if could_fit(unclamped, node, size)), pool.max_nodes)


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


def total_size(sizes: Iterable[NodeSize]) -> NodeSize:
    """Add up several sizes, and return the total number of CPUs and the total number of GPUs."""
    return NodeSize(*map(sum, zip(*sizes, strict=True))) if (sizes := list(sizes)) else NodeSize(0, 0)
