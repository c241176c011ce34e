"""Request of a PyTorch training, and the number and size of its workers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from shoal.data.dataset_spec import DatasetSpec
from shoal.data.ingest import cpus_to_read
from shoal.errors import InvalidArgumentError
from shoal.option_validation import Settings, optional, positive_or_all
from shoal.training.cluster import Node, limited, resources, workers_on
from shoal.training.demand import GangClaim, GangDemand
from shoal.training.gang.placement import GangShape
from shoal.training.run_config import RunConfig

DATABRICKS_NODE_TYPE = re.compile(r"GPU_(?P<gpus>\d+)x(?P<type>.+)", re.IGNORECASE)
"""Type of a node of Databricks, such as ``GPU_8xH100``."""


class WorkerResourceConfig(Settings):
    """CPUs and GPUs that one worker reserves.

    Example:
        >>> WorkerResourceConfig(num_cpus=2)
    """

    num_cpus: int = Field(
        default=1,
        ge=0,
        description="Number of CPUs that the worker reserves, and of threads that PyTorch uses. With 0 the worker "
        "reserves no CPU and uses one thread. If Ray Data reads datasets, it gets half of the CPUs, at least 0.5 CPUs "
        "for each dataset, and the worker reserves the rest.",
    )
    num_gpus: int = Field(
        default=0,
        ge=-1,
        description="Number of GPUs that the worker reserves. -1: an equal share of its node's GPUs; only with "
        "`PyTorchScalingConfig`.",
    )
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        description="Required type of the node's GPUs, by the name that Ray uses for it, such as H100. A name in lower "
        "case, such as h100, is converted to upper case. None: any type.",
    )

    @field_validator("gpu_type")
    @classmethod
    def _as_in_ray(cls, name: str | None) -> str | None:
        """Convert a GPU type as Databricks writes it to Ray's name: "h100" and "GPU_8xH100" to "H100"."""
        if name is not None and (node := DATABRICKS_NODE_TYPE.fullmatch(name)):
            name = node["type"].lower()
        return name.upper() if name is not None and name.islower() and name.replace("-", "").isalnum() else name

    @model_validator(mode="after")
    def _of_gpus(self) -> Self:
        if self.gpu_type is not None and not self.num_gpus:
            raise ValueError(
                f'gpu_type="{self.gpu_type}" requires GPUs, but num_gpus is 0: request GPUs, or remove gpu_type'
            )
        return self


class PyTorchScalingConfig(Settings):
    """Number of nodes, the number of workers on each node, and the resources of each worker.

    The values are not checked against this machine, so GPUs may be requested on a machine without a GPU.

    Example:
        >>> PyTorchScalingConfig(num_nodes=2, num_workers_per_node=1)
    """

    num_nodes: Annotated[int, positive_or_all("for all nodes that have room for the workers")] = Field(
        default=1, description="Number of nodes that run workers. -1: all active nodes that have room for the workers."
    )
    num_workers_per_node: Annotated[int, positive_or_all("for one worker on each GPU")] = Field(
        default=1,
        description="Number of workers on each node that runs workers. -1: one worker for each GPU of the node, but "
        "not more than its CPUs allow, or one worker if the node has no GPU.",
    )
    resource_requirements_per_worker: WorkerResourceConfig = Field(
        default_factory=WorkerResourceConfig, description="Resources that each worker reserves."
    )


class SpreadScalingConfig(Settings):
    """Number of workers and the resources of each; the workers run on any nodes that have room.

    Example:
        >>> SpreadScalingConfig(num_workers=3)
    """

    num_workers: int = Field(ge=1, description="Number of workers.")
    resource_requirements_per_worker: WorkerResourceConfig = Field(
        default_factory=WorkerResourceConfig, description="Resources that each worker reserves."
    )

    @model_validator(mode="after")
    def _known_gpus(self) -> Self:
        if self.resource_requirements_per_worker.num_gpus < 0:
            raise ValueError(
                "num_gpus=-1 is allowed only in PyTorchScalingConfig: set the number of GPUs of each worker"
            )
        return self


def spread(
    gpus: int = 0, num_workers: int | None = None, num_cpus: int = 1, gpu_type: str | None = None
) -> SpreadScalingConfig:
    """Convert the arguments of `@distributed` or `@ray_launch` to a scaling config whose workers may run on any nodes.

    Raises:
        InvalidArgumentError: The GPUs cannot be divided evenly among the workers, or a number is wrong.
    """
    workers = num_workers if num_workers is not None else max(1, gpus)
    if workers < 1 or gpus < 0 or gpus % workers:
        raise InvalidArgumentError(
            f"gpus={gpus} cannot be divided among num_workers={workers}: gpus must be 0 or a multiple of num_workers, "
            "and num_workers at least 1"
        )
    each = WorkerResourceConfig(num_cpus=num_cpus, num_gpus=gpus // workers, gpu_type=gpu_type)
    return SpreadScalingConfig(num_workers=workers, resource_requirements_per_worker=each)


def launched() -> SpreadScalingConfig:
    """Return the scaling config of `@ray_launch`: one worker that reserves no CPUs and no GPUs.

    All CPUs and GPUs then are free for the Ray tasks and actors that the function starts.
    """
    return SpreadScalingConfig(num_workers=1, resource_requirements_per_worker=WorkerResourceConfig(num_cpus=0))


def on_one_node(config: SpreadScalingConfig, *, all_gpus: bool, per_gpu: bool) -> PyTorchScalingConfig:
    """Convert a scaling config whose workers may run on any nodes to a scaling config whose workers run on one node."""
    each = config.resource_requirements_per_worker
    return PyTorchScalingConfig(
        num_workers_per_node=-1 if per_gpu else config.num_workers,
        resource_requirements_per_worker=each.model_copy(update={"num_gpus": -1}) if all_gpus else each,
    )


AnyScaling = PyTorchScalingConfig | SpreadScalingConfig


def needed_cpus(each: WorkerResourceConfig, ray_streams: int) -> float:
    """Return the CPUs that a worker and the tasks of Ray Data that read its rows need together."""
    return max(each.num_cpus, cpus_to_read(each.num_cpus, ray_streams))


def lay_out(
    config: AnyScaling,
    nodes: Sequence[Node],
    *,
    ray_streams: int = 0,
    clamp: bool = False,
    option: str | None = None,
) -> GangShape:
    """Compute how many workers run, in total and per node, and check that the active nodes have room for the workers.

    Args:
        config: Number and size of the workers.
        nodes: The active nodes.
        ray_streams: Number of datasets that each worker reads with Ray Data.
        clamp: Whether to reduce the number of workers if there is too little room.
        option: Name of the option with the number of workers, for messages.

    Raises:
        CapacityError: There is no room for the workers on the active nodes.
    """
    if isinstance(config, PyTorchScalingConfig):
        config = _with_numbers(config, nodes, ray_streams)
    each = config.resource_requirements_per_worker
    cpus, reading = needed_cpus(each, ray_streams), cpus_to_read(each.num_cpus, ray_streams)
    fits = [workers_on(node, cpus, each.num_gpus, each.gpu_type) for node in nodes]

    def checked(name: str, wanted: int, room: int) -> int:
        claim = resources(cpus, each.num_gpus, each.gpu_type)
        if cpus > each.num_cpus:
            claim += f" (Ray Data needs {reading:g} CPUs to read {ray_streams} dataset{'s' * (ray_streams > 1)})"
        return limited(wanted, room, f"{name}={wanted} of {claim} for each worker", nodes, clamp=clamp)

    if isinstance(config, SpreadScalingConfig):
        per_node = None
        workers = checked(option or "num_workers", config.num_workers, sum(fits))
    else:
        per_node = checked(option or "num_workers_per_node", config.num_workers_per_node, max(fits, default=0))
        usable = sum(fit >= per_node for fit in fits)
        workers = per_node * (usable if config.num_nodes == -1 else checked("num_nodes", config.num_nodes, usable))
    reserved = max(0.0, each.num_cpus - reading)
    return GangShape(workers, reserved, each.num_gpus, each.gpu_type, per_node, reading_cpus=reading)


def _with_numbers(config: PyTorchScalingConfig, nodes: Sequence[Node], ray_streams: int) -> PyTorchScalingConfig:
    """Replace -1 in `num_workers_per_node` or `num_gpus` by a number that fits on the node with the most GPUs."""
    each, per_node = config.resource_requirements_per_worker, config.num_workers_per_node
    of_type = [node for node in nodes if workers_on(node, 0, 0, each.gpu_type)]
    best = max(of_type, key=lambda node: (node["gpus"], node["cpus"]), default=Node(name="", cpus=0, gpus=0))
    if per_node == -1:
        room = workers_on(best, needed_cpus(each, ray_streams), 0)
        per_node = max(1, min(best["gpus"] // max(1, each.num_gpus), room))
    if each.num_gpus == -1:
        each = each.model_copy(update={"num_gpus": best["gpus"] // per_node})
    return config.model_copy(update={"num_workers_per_node": per_node, "resource_requirements_per_worker": each})


def nodes_needed(config: SpreadScalingConfig, active: Sequence[Node], further: Node) -> int | None:
    """Compute how many nodes are needed for all workers.

    The workers first fill the active nodes, in their order, and then further nodes.

    Returns:
        Number of nodes; None if the active nodes have too little room and no worker fits on a further node.
    """
    each = config.resource_requirements_per_worker
    left = config.num_workers
    for number, node in enumerate(active, start=1):
        left -= fitting(node, each)
        if left <= 0:
            return number
    per_node = fitting(further, each)
    return len(active) + math.ceil(left / per_node) if per_node else None


def fitting(node: Node, each: WorkerResourceConfig) -> int:
    """Return how many workers with the given resources fit on a node."""
    return workers_on(node, each.num_cpus, each.num_gpus, each.gpu_type)


class FunctionRequest(Settings):
    """Request to run a user's function in several workers, with its datasets, hyperparameters and number of workers.

    The distributors create this request. The spec of a job contains these fields and others. The function itself is
    pickled and sent separately.
    """

    name: str = Field(default="function", min_length=1, description="Name of the function, which is shown to users.")
    dataset_map: dict[str, DatasetSpec] = Field(
        default_factory=dict, description="Datasets by name. A `DataConnector` is accepted and converted to its spec."
    )
    hyper_params: dict[str, JsonValue] = Field(
        default_factory=dict, description="Values that `get_hyper_params` returns in the workers."
    )
    scaling_config: AnyScaling = Field(
        default_factory=PyTorchScalingConfig, description="Number of workers, and the CPUs and GPUs of each worker."
    )
    room_for: SpreadScalingConfig | None = optional(
        "Number and size of further workers that the function starts itself. The run starts only if the "
        "pool has room for these workers. None: the function starts no workers."
    )
    torch_distributor: Literal["local", "distributed"] | None = optional(
        "Mode of the `TorchDistributor` that has created the request. The run then prints PySpark's lines "
        "about the start and the end of the training. None: another program has created the request."
    )
    run_config: RunConfig = Field(
        default_factory=RunConfig, description="Name of the pool that runs the function, and the limits of the run."
    )

    @property
    def ray_streams(self) -> int:
        """Return the number of datasets that each worker reads with Ray Data, perhaps at the same time."""
        return sum(spec.ingester == "ray" for spec in self.dataset_map.values())

    @property
    def is_launcher(self) -> bool:
        """Return whether the function is no rank, but starts others itself."""
        return self.room_for is not None

    def demand(self) -> GangDemand:
        """Return what the function needs of its pool's nodes."""
        # If the function starts further workers itself, only these are counted, because the workers that call the
        # function only wait for them and need almost no resources.
        counted = self.room_for or self.scaling_config
        each = counted.resource_requirements_per_worker
        cpus = needed_cpus(each, 0 if self.room_for else self.ray_streams)
        if isinstance(counted, PyTorchScalingConfig):
            nodes, per_node = counted.num_nodes, counted.num_workers_per_node
            workers = nodes * per_node if nodes > 0 and per_node > 0 else -abs(per_node)
            gang = GangClaim(workers, cpus, each.num_gpus, per_gpu=per_node == -1, nodes=nodes)
        else:
            gang = GangClaim(counted.num_workers, cpus, each.num_gpus)
        option = "num_processes" if self.torch_distributor else None
        return GangDemand(
            gang,
            partial(lay_out, self.scaling_config, ray_streams=self.ray_streams, option=option),
            self.run_config,
            tuple(self.dataset_map.values()),
            also=(partial(lay_out, self.room_for),) if self.room_for else (),
            starts_ray_tasks=self.is_launcher,
            counts_gpus=gang.per_gpu,
        )


@dataclass(frozen=True, slots=True)
class RankStats:
    """Rank and node of one worker, and the peak memory of the worker's process.

    Args:
        rank: Rank of the worker.
        node: Name of the node that the worker ran on.
        peak_rss_bytes: Highest resident memory of the worker's process, in bytes.
    """

    rank: int
    node: str
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class MissingValue:
    """Stands in a result for a return value that cannot be pickled or unpickled.

    Args:
        reason: Type of the value, and the error.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """Result of running a user's function in several workers.

    Args:
        results: Return values of the function, by rank; a `MissingValue` for a value that cannot be sent.
        metrics: The last value of each metric that rank 0 logged.
        model_dir: Path or URI of the folder with the merged model files of all ranks.
        num_workers: Number of workers that ran at the end.
        restarts: Number of times that the run resumed from a checkpoint after a worker was lost.
        seconds: Time in seconds from the call to the result.
        workers: Resources of each worker, by rank.
        start_seconds: Time in seconds from the call until all workers were ready to call the function; after a restart,
            until the new workers were ready.
        model_files: Number of files in the merged model folder.
    """

    results: tuple[Any, ...]
    metrics: dict[str, float]
    model_dir: str
    num_workers: int
    restarts: int
    seconds: float
    workers: tuple[RankStats, ...]
    start_seconds: float = 0.0
    model_files: int = 0
