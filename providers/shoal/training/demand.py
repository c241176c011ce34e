"""What a job needs of the nodes of its pool, and the number and size of a boosting training's workers.

The queue, the embedded pool and the engine all read a request's or spec's `GangDemand`. Only `GangDemand.resolved`,
which the engine calls once per attempt, looks at the nodes of this process's cluster; all else only computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import ConfigDict, Field

from shoal.data.dataset_spec import DatasetSpec
from shoal.data.ingest import cpus_to_read
from shoal.errors import CapacityError, InvalidArgumentError
from shoal.option_validation import Settings, optional, positive_or_all
from shoal.training import cluster
from shoal.training.cluster import Node, limited, limited_nodes, listed, resources, workers_on
from shoal.training.gang.placement import GangShape
from shoal.training.run_config import RunConfig


class NodeSize(NamedTuple):
    """CPUs and GPUs of one ready node."""

    cpus: int
    gpus: int


def total_size(sizes: Iterable[NodeSize]) -> NodeSize:
    """Add up several sizes, and return the total number of CPUs and the total number of GPUs."""
    return NodeSize(*map(sum, zip(*sizes, strict=True))) if (sizes := list(sizes)) else NodeSize(0, 0)


@dataclass(frozen=True)
class GangClaim:
    """Group of workers that a job asks for. The number of workers is fixed, or depends on the pool's nodes or GPUs.

    Attributes:
        workers: Number of workers; a negative number -n means n workers on each node.
        cpus: CPUs of each worker and of Ray Data's tasks that read its rows; -1: all CPUs of a node, divided among its
            workers.
        gpus: GPUs of each worker; -1: one GPU if every node has a GPU, otherwise none.
        per_gpu: Whether a negative `workers` means one worker per GPU if the workers use GPUs.
        nodes: On how many nodes a negative `workers` is, those with the most GPUs; -1: all that the job may use.
    """

    workers: int = -1
    cpus: float = -1
    gpus: int = 0
    per_gpu: bool = False
    nodes: int = -1

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the group of workers as plain data, which the job's row stores."""
        return asdict(self)

    @property
    def uses_all_nodes(self) -> bool:
        """Return whether the number of workers depends on the number of nodes."""
        return self.workers < 0 and self.nodes == -1

    def claim(self, nodes: Sequence[NodeSize], most_nodes: int | None = None) -> NodeSize:
        """Return how many CPUs and GPUs the workers need in total, but at most as many as the given nodes have.

        If the workers use all nodes, at most `most_nodes` nodes count.
        """
        if self.workers < 0 < self.nodes:
            nodes = sorted(nodes, key=lambda node: (node.gpus, node.cpus))[-self.nodes :]
        gpus = self.gpus if self.gpus >= 0 else int(all(node.gpus for node in nodes))
        if self.uses_all_nodes:
            nodes = limited_nodes(nodes, most_nodes, lambda node: node.cpus)
        total = total_size(nodes)
        workers = self.workers
        if workers < 0:
            workers = total.gpus if self.per_gpu and gpus else -workers * len(nodes)
        cpus = math.ceil(workers * self.cpus) if self.cpus >= 0 else total.cpus * workers // max(1, len(nodes))
        return NodeSize(min(cpus, total.cpus), min(workers * gpus, total.gpus))

    def size(self, nodes: Sequence[Node], *, ray_streams: int = 0, clamp: bool = False) -> GangShape:
        """Compute the number of workers, and the CPUs, threads and GPUs of each worker.

        All workers have the same size. If they divide the CPUs of the nodes, the size depends on the nodes. First, the
        workers are assigned to the nodes. If their number depends on the nodes, each node, or each GPU, gets one
        worker. Otherwise each worker is assigned to the node that can give it the most CPUs. Then the CPUs of each node
        are divided by the number of its workers, and every worker gets the smallest of these quotients.

        Args:
            nodes: The active nodes.
            ray_streams: Number of datasets that each worker reads with Ray Data at the same time.
            clamp: Whether to reduce the number of workers and CPUs if there is too little room.

        Raises:
            CapacityError: There is no room for the workers on the active nodes.
        """
        gpus = self.gpus if self.gpus >= 0 else int(bool(nodes) and all(node["gpus"] for node in nodes))
        usable = [node for node in nodes if workers_on(node, 1, gpus)]
        if not usable:
            needed = "a GPU and a CPU" if gpus else "a CPU"
            raise CapacityError(
                f"no active node ({listed(nodes)}) has {needed} for a worker: add nodes with shoal.scale_cluster"
            )
        cpus, largest = int(self.cpus), max(node["cpus"] for node in usable)
        cpus = 1 if cpus == -1 else limited(cpus, largest, f"num_cpu_per_worker={cpus}", nodes, clamp=clamp)
        each_node = [node["gpus"] if gpus else 1 for node in usable]
        wanted = sum(each_node) if self.workers == -1 else self.workers
        request = f"num_workers={self.workers}" + (f" (which means {wanted})" if self.workers == -1 else "")
        room = sum(workers_on(node, cpus, gpus) for node in usable)
        workers = limited(wanted, room, f"{request} of {resources(cpus, gpus)} for each worker", nodes, clamp=clamp)
        if self.cpus == -1:
            by_default = self.workers == -1 and workers == wanted
            assigned = each_node if by_default else _assign(usable, workers, gpus)
            cpus = min(node["cpus"] // count for node, count in zip(usable, assigned, strict=True) if count)
        reading = cpus_to_read(cpus, ray_streams)
        return GangShape(workers, cpus - reading, gpus, trim_memory=True, reading_cpus=reading)


class Size(Protocol):
    """Function that computes the number and size of workers on nodes, or raises CapacityError."""

    def __call__(self, nodes: Sequence[Node], *, clamp: bool) -> GangShape:
        """Compute them; `clamp`: reduce them to what fits."""


@dataclass(frozen=True)
class GangDemand:
    """What a job needs of the nodes of its pool.

    Attributes:
        gang: Its workers, as the pool's queue counts them.
        size: Function that computes their number and size for the engine.
        run_config: Options of the run.
        inputs: Datasets that the workers read.
        also: Functions for other workers that need room before or after.
        starts_ray_tasks: Whether the job starts tasks or actors of Ray beside its workers.
        counts_gpus: Whether the number of workers depends on the number of GPUs, although they may reserve none.
        why_cpu: Function that returns the reason why workers that decide it themselves use no GPUs; None: they use
            them.
    """

    gang: GangClaim
    size: Size
    run_config: RunConfig
    inputs: tuple[DatasetSpec, ...]
    also: tuple[Size, ...] = ()
    starts_ray_tasks: bool = False
    counts_gpus: bool = False
    why_cpu: Callable[[], str | None] = lambda: None

    def resolved(self, *, clamp: bool | None = None) -> GangShape:
        """Return the number and size of the workers on the active nodes.

        Args:
            clamp: Whether to reduce the number to what fits; by default that of the run.

        Raises:
            CapacityError: There is no room for the workers.
        """
        nodes = cluster.nodes_to_use() if self.gang.uses_all_nodes else cluster.active_nodes()
        return self.size(nodes, clamp=self.run_config.clamp if clamp is None else clamp)

    @property
    def needs_ray(self) -> bool:
        """Return whether the job can run only on a pool with Ray: it has its own packages or code, uses GPUs, reads
        rows with Ray Data, or starts Ray tasks. Whether a function calls Ray otherwise is not known."""
        has_own_modules = bool(self.run_config.packages or self.run_config.code)
        reads_with_ray = any(each.ingester == "ray" for each in self.inputs)
        return has_own_modules or self.gang.gpus > 0 or self.starts_ray_tasks or reads_with_ray

    def could_fit(self, node: NodeSize, max_nodes: int, *, clamp: bool | None = None) -> bool:
        """Return whether the workers would fit on a pool with this number of equal nodes; `clamp` is by default that
        of the run."""
        nodes = [Node(name="", cpus=node.cpus, gpus=node.gpus)] * max_nodes
        with warnings.catch_warnings(action="ignore"):
            try:
                for size in (self.size, *self.also):
                    size(nodes, clamp=self.run_config.clamp if clamp is None else clamp)
            except CapacityError:
                return False
        return True


_FEW_ROWS = 200_000
"""Number of rows per worker below which one worker per node, with more threads, trains faster than several, because the
workers exchange results after each level of a tree. Measured with `tests/benchmarks/workers.py` on two cores, seconds
with one worker of two threads and with two workers of one thread: XGBoost 1.8 and 2.3 with 164,000 rows per worker and
16 columns, 21.0 and 37.0 with 25,000 rows and 1,000 columns, 12.3 and 11.3 with 1 million rows and 28 columns; LightGBM
2.1 and 2.4, 18.9 and 26.5, 10.8 and 10.9."""

_FEWEST_ROWS = 10_000
"""Number of rows per worker below which no advice is given, because the training is short anyway."""

_PositiveOrAll = Annotated[int, positive_or_all("to use all active nodes and their CPUs")]


class ScalingConfig(Settings):
    """Number of workers of a boosting training, and the CPUs and GPUs of each worker.

    The values are not checked against this machine, so ``use_gpu=True`` is allowed on a machine without a GPU.
    """

    model_config = ConfigDict(strict=True)

    num_workers: _PositiveOrAll = Field(
        default=-1,
        description="Number of workers. -1: one worker per active node, or one per GPU if the training uses GPUs.",
    )
    num_cpu_per_worker: _PositiveOrAll = Field(
        default=-1,
        description="Number of CPUs, and also of threads, of each worker. -1: the CPUs of each node divided by its "
        "number of workers.",
    )
    use_gpu: bool | None = optional(
        "Whether to train on GPUs. None: XGBoost trains on GPUs if every active node has one and the "
        "installed XGBoost has CUDA; all attempts of a job make the same choice. LightGBM then trains on CPUs, because "
        "its wheels on PyPI have no CUDA."
    )

    def gang(self, *, use_gpu: bool | None) -> GangClaim:
        """Return these workers with or without GPUs; None: with GPUs if every node has one."""
        gpus = -1 if use_gpu is None else int(use_gpu)
        return GangClaim(self.num_workers, self.num_cpu_per_worker, gpus, per_gpu=True)


class XGBScalingConfig(ScalingConfig):
    """Number of workers that train an XGBoost model, and the CPUs and GPUs of each worker.

    Example:
        >>> XGBScalingConfig(num_workers=2, num_cpu_per_worker=1)
    """


class LightGBMScalingConfig(ScalingConfig):
    """Number of workers that train a LightGBM model, and the CPUs and GPUs of each worker.

    Example:
        >>> LightGBMScalingConfig(num_workers=2, num_cpu_per_worker=1)
    """


def wider_workers(size: GangShape, nodes: Sequence[str], rows: int) -> str | None:
    """Return the advice to use fewer workers with more threads, or None if it would not make the training faster."""
    used, each = len(set(nodes)), rows // len(nodes)
    if size.gpus_per_worker or used == len(nodes) or not _FEWEST_ROWS <= each < _FEW_ROWS:
        return None
    threads = size.threads * (len(nodes) // used)
    return (
        f"{len(nodes)} workers on {used} node(s) have about {each:,} rows each: one worker per node would train faster "
        f"(num_workers={used}, num_cpu_per_worker={threads}), but would give a slightly different model"
    )


def gpu_wish(config: ScalingConfig, device: str | None) -> bool | None:
    """Return whether the user requests GPUs, by `use_gpu` or the parameter `device`; None if the user set neither.

    Raises:
        InvalidArgumentError: The config and the device parameter contradict each other.
    """
    if device is None:
        return config.use_gpu
    on_gpu = device.startswith(("cuda", "gpu"))
    if config.use_gpu is not None and config.use_gpu != on_gpu:
        raise InvalidArgumentError(
            f'device="{device}" in params contradicts use_gpu={config.use_gpu} in the scaling config: '
            "remove one of the two"
        )
    return on_gpu


def _assign(nodes: Sequence[Node], workers: int, gpus: int) -> list[int]:
    """Assign each worker to the node that can give it the most CPUs, and return the number of workers of each node."""
    assigned = [0] * len(nodes)
    for _ in range(workers):
        _, best = max(
            (node["cpus"] / (assigned[i] + 1), -i)
            for i, node in enumerate(nodes)
            if assigned[i] < workers_on(node, 1, gpus)
        )
        assigned[-best] += 1
    return assigned
