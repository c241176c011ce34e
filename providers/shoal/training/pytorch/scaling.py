"""Compute how many workers run a function, in total and on each node, from the scaling config and the active nodes.

The functions in this module do not call Ray. Their results depend only on their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field, field_validator, model_validator

from shoal.errors import InvalidArgumentError
from shoal.option_validation import Settings
from shoal.training.capacity import Node, limited, resources, workers_on


class WorkerResourceConfig(Settings):
    """CPUs and GPUs that one worker reserves.

    Example:
        >>> WorkerResourceConfig(num_cpus=2)
    """

    num_cpus: int = Field(
        default=1,
        ge=0,
        description="Number of CPUs that the worker reserves, and of threads that PyTorch uses. With 0 the worker "
        "reserves no CPU and uses one thread.",
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
        """Convert a GPU type that is written in lower case to upper case, for example "h100" to "H100".

        Databricks' examples use lower case, but Ray's names of GPU types contain upper-case letters.
        """
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

    num_nodes: int = Field(
        default=1, description="Number of nodes that run workers. -1: all active nodes that have room for the workers."
    )
    num_workers_per_node: int = Field(
        default=1,
        description="Number of workers on each node that runs workers. -1: one worker for each GPU of the node, but "
        "not more than its CPUs allow, or one worker if the node has no GPU.",
    )
    resource_requirements_per_worker: WorkerResourceConfig = Field(
        default_factory=WorkerResourceConfig, description="Resources that each worker reserves."
    )

    @field_validator("num_nodes")
    @classmethod
    def _positive_or_all(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be a positive number, or -1 for all nodes that have room for the workers")
        return value

    @field_validator("num_workers_per_node")
    @classmethod
    def _positive_or_one_per_gpu(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be a positive number, or -1 for one worker on each GPU")
        return value


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


def spread(gpus: int, num_workers: int | None, num_cpus: int, gpu_type: str | None) -> SpreadScalingConfig:
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Result of :func:`lay_out`: number of workers, number of workers per node, and the resources of each worker.

    Args:
        num_workers: Number of workers.
        per_node: Number of workers on each node; None: the workers run on any nodes that have room.
        each: CPUs and GPUs that each worker reserves.
    """

    num_workers: int
    per_node: int | None
    each: WorkerResourceConfig


def lay_out(config: AnyScaling, nodes: Sequence[Node], *, clamp: bool = False, option: str | None = None) -> Layout:
    """Compute how many workers run, in total and per node, and check that the active nodes have room for the workers.

    Raises:
        CapacityError: There is no room for the workers on the active nodes.
    """
    if isinstance(config, PyTorchScalingConfig):
        config = _with_numbers(config, nodes)
    each = config.resource_requirements_per_worker
    fits = [fitting(node, each) for node in nodes]

    def checked(name: str, wanted: int, room: int) -> int:
        claim = resources(each.num_cpus, each.num_gpus, each.gpu_type)
        return limited(wanted, room, f"{name}={wanted} of {claim} for each worker", nodes, clamp=clamp)

    if isinstance(config, SpreadScalingConfig):
        return Layout(checked(option or "num_workers", config.num_workers, sum(fits)), None, each)
    per_node = checked(option or "num_workers_per_node", config.num_workers_per_node, max(fits, default=0))
    usable = sum(fit >= per_node for fit in fits)
    wanted = usable if config.num_nodes == -1 else checked("num_nodes", config.num_nodes, usable)
    return Layout(wanted * per_node, per_node, each)


def _with_numbers(config: PyTorchScalingConfig, nodes: Sequence[Node]) -> PyTorchScalingConfig:
    """Replace -1 in `num_workers_per_node` or `num_gpus` by a number that fits on the node with the most GPUs."""
    each, per_node = config.resource_requirements_per_worker, config.num_workers_per_node
    of_type = [node for node in nodes if workers_on(node, 0, 0, each.gpu_type)]
    best = max(of_type, key=lambda node: (node["gpus"], node["cpus"]), default=Node(name="", cpus=0, gpus=0))
    if per_node == -1:
        per_node = max(1, min(best["gpus"] // max(1, each.num_gpus), workers_on(best, each.num_cpus, 0)))
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
