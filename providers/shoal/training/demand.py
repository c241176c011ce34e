"""What a job needs of the nodes of its pool. The queue, the embedded pool and the engine all read it from here.

A request or spec returns its `GangDemand`. Only `GangDemand.resolved`, which the engine calls once per attempt, looks
at the nodes of this process's cluster; all else only computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import CapacityError
from shoal.training.cluster import Node, limited_nodes, nodes_to_size
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
    """

    workers: int = -1
    cpus: float = -1
    gpus: int = 0
    per_gpu: bool = False

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

    def resolved(self, count: int, *, clamp: bool | None = None) -> GangShape:
        """Return the number and size of the workers on the active nodes.

        Args:
            count: Requested number of workers or nodes; see :func:`~shoal.training.cluster.nodes_to_size`.
            clamp: Whether to reduce the number to what fits; by default that of the run.

        Raises:
            CapacityError: There is no room for the workers.
        """
        return self.size(nodes_to_size(count), clamp=self.run_config.clamp if clamp is None else clamp)

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
