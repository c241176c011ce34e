"""Compute the number and the nodes of a function's workers from its scaling config and the active nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field, field_validator, model_validator

from shoal.errors import InvalidArgumentError
from shoal.settings import Settings
from shoal.training.capacity import Node, limited, resources, workers_on


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
        config: The requested workers.
        nodes: The active nodes.
        clamp: Whether to reduce a request that does not fit, with a warning, instead of refusing it.

    Raises:
        CapacityError: If there is no room for the workers on the active nodes.
    """
    each = config.resource_requirements_per_worker
    fits = [fitting(node, each) for node in nodes]

    def checked(option: str, wanted: int, room: int) -> int:
        claim = resources(each.num_cpus, each.num_gpus, each.gpu_type)
        return limited(wanted, room, f"{option}={wanted} of {claim} for each worker", nodes, clamp=clamp)

    if isinstance(config, SpreadScalingConfig):
        return Layout(checked("num_workers", config.num_workers, sum(fits)), None, each)
    per_node = checked("num_workers_per_node", config.num_workers_per_node, max(fits, default=0))
    usable = sum(fit >= per_node for fit in fits)
    wanted = usable if config.num_nodes == -1 else checked("num_nodes", config.num_nodes, usable)
    return Layout(wanted * per_node, per_node, each)


def fitting(node: Node, each: WorkerResourceConfig) -> int:
    """Return the number of workers for which a node has room."""
    return workers_on(node, each.num_cpus, each.num_gpus, each.gpu_type)
