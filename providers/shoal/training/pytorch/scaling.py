"""Number, nodes and resources of a function's workers. Pure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field, field_validator, model_validator

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.settings import Settings
from shoal.training.scaling import Node


class WorkerResourceConfig(Settings):
    """What one worker claims.

    Example:
        >>> WorkerResourceConfig(num_cpus=2)
    """

    num_cpus: int = Field(default=1, ge=0, description="CPUs, and PyTorch's threads; 0 claims none and has one thread.")
    num_gpus: int = Field(default=0, ge=0, description="GPUs.")
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        description="Type that its node's GPUs must be of, as Ray names it (H100).",
    )

    @model_validator(mode="after")
    def _of_gpus(self) -> Self:
        if self.gpu_type is not None and not self.num_gpus:
            raise ValueError(f'gpu_type="{self.gpu_type}" is of GPUs, and num_gpus=0')
        return self


class PyTorchScalingConfig(Settings):
    """How many workers run, and where.

    It says nothing of the machine that it is made on: GPUs may be asked for where there are none.

    Example:
        >>> PyTorchScalingConfig(num_nodes=2, num_workers_per_node=1)
    """

    num_nodes: int = Field(default=1, description="Nodes to run on; -1: all active ones that have room.")
    num_workers_per_node: int = Field(default=1, ge=1, description="Workers on each of them.")
    resource_requirements_per_worker: WorkerResourceConfig = Field(
        default_factory=WorkerResourceConfig, description="What each worker claims."
    )

    @field_validator("num_nodes")
    @classmethod
    def _positive_or_all(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be a positive number, or -1 for all there are")
        return value


class SpreadScalingConfig(Settings):
    """How many workers run, wherever there is room.

    Example:
        >>> SpreadScalingConfig(num_workers=3)
    """

    num_workers: int = Field(ge=1, description="Number of workers.")
    resource_requirements_per_worker: WorkerResourceConfig = Field(
        default_factory=WorkerResourceConfig, description="What each worker claims."
    )


def spread(gpus: int, num_workers: int | None, num_cpus: int, gpu_type: str | None) -> SpreadScalingConfig:
    """Return the scaling config of a decorated function.

    Args:
        gpus: GPUs, of all workers together.
        num_workers: Number of workers; by default one per GPU, or one.
        num_cpus: CPUs that each worker claims.
        gpu_type: Type that the GPUs must be of.

    Raises:
        InvalidArgumentError: If the GPUs cannot be divided evenly, or a number is wrong.
    """
    workers = num_workers if num_workers is not None else max(1, gpus)
    if workers < 1 or gpus < 0 or gpus % workers:
        raise InvalidArgumentError(f"gpus={gpus} cannot be divided among num_workers={workers}")
    each = WorkerResourceConfig(num_cpus=num_cpus, num_gpus=gpus // workers, gpu_type=gpu_type)
    return SpreadScalingConfig(num_workers=workers, resource_requirements_per_worker=each)


AnyScaling = PyTorchScalingConfig | SpreadScalingConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers on nodes.

    Args:
        num_workers: Number of workers.
        per_node: Workers on each node; None: wherever there is room.
        each: What each worker claims.
    """

    num_workers: int
    per_node: int | None
    each: WorkerResourceConfig


def lay_out(config: AnyScaling, nodes: Sequence[Node], *, clamp: bool = False) -> Layout:
    """Assign workers to nodes that have room for them.

    Args:
        config: What was asked for.
        nodes: The active nodes.
        clamp: Use what there is, with a warning, where it is less than was asked for.

    Raises:
        CapacityError: If the active nodes cannot hold the workers.
    """
    each = config.resource_requirements_per_worker
    fits = [fitting(node, each) for node in nodes]
    if isinstance(config, SpreadScalingConfig):
        room = sum(fits)
        wanted = _limited("num_workers", config.num_workers, room, each, nodes, clamp)
        return Layout(wanted, None, each)
    most = max(fits, default=0)
    per_node = _limited("num_workers_per_node", config.num_workers_per_node, most, each, nodes, clamp)
    roomy = sum(fit >= per_node for fit in fits)
    wanted = roomy if config.num_nodes == -1 else _limited("num_nodes", config.num_nodes, roomy, each, nodes, clamp)
    return Layout(wanted * per_node, per_node, each)


_ANY_NUMBER = 1_000
"""Workers that claim nothing: as many on a node as anybody starts."""


def fitting(node: Node, each: WorkerResourceConfig) -> int:
    """How many workers a node has room for."""
    if each.gpu_type is not None and node.get("gpu_type", each.gpu_type) != each.gpu_type:
        return 0
    cpus = node["cpus"] // each.num_cpus if each.num_cpus else _ANY_NUMBER
    return min(cpus, node["gpus"] // each.num_gpus if each.num_gpus else _ANY_NUMBER)


def _limited(name: str, wanted: int, room: int, each: WorkerResourceConfig, nodes: Sequence[Node], clamp: bool) -> int:
    if wanted <= room:
        return wanted
    sizes = ", ".join(map(_size, nodes)) or "none is active"
    problem = f"{name}={wanted} of {_described(each)} for each worker is more than there is room for, {room} ({sizes})"
    if not clamp or not room:
        raise CapacityError(
            f"{problem}: add nodes with shoal.scale_cluster, ask for less, or set RunConfig(clamp=True)"
        )
    warnings.warn(f"{problem}: reduced to {room}", stacklevel=3)
    return room


def _described(each: WorkerResourceConfig) -> str:
    cpus = f"{each.num_cpus} CPU{'' if each.num_cpus == 1 else 's'}"
    kind = f"{each.gpu_type} GPU" if each.gpu_type else "GPU"
    return f"{cpus} and {each.num_gpus} {kind}{'' if each.num_gpus == 1 else 's'}" if each.num_gpus else cpus


def _size(node: Node) -> str:
    kind = f"{node['gpu_type']} GPUs" if node.get("gpu_type") else "GPUs"
    return f"{node['name']}: {node['cpus']} CPUs, {node['gpus']} {kind}"
