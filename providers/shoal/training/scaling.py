"""Number and size of a boosting training's workers, from its scaling config and the active nodes. Pure."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from pydantic import ConfigDict, Field, field_validator

from shoal.errors import CapacityError, InvalidArgumentError
from shoal.settings import Settings


class Node(TypedDict):
    """An active node, as `get_nodes` lists it; the type of its GPUs only a connected process knows."""

    name: str
    cpus: int
    gpus: int
    gpu_type: NotRequired[str | None]


class ScalingConfig(Settings):
    """Number and resources of the workers.

    It does not depend on this machine: ``use_gpu=True`` is legal on a machine without a GPU.
    """

    model_config = ConfigDict(strict=True)

    num_workers: int = Field(
        default=-1, description="Number of workers; -1: one per active node, or per GPU where GPUs are used."
    )
    num_cpu_per_worker: int = Field(
        default=-1, description="CPUs, and threads, per worker; -1: the node's CPUs divided by its workers."
    )
    use_gpu: bool | None = Field(
        default=None,
        description="Train on GPUs; None: if every active node has one (LightGBM: no, since its wheels have no CUDA).",
    )

    @field_validator("num_workers", "num_cpu_per_worker")
    @classmethod
    def _positive_or_all(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be a positive number, or -1 for all there is")
        return value


class XGBScalingConfig(ScalingConfig):
    """Number and resources of the workers that train an XGBoost model.

    Example:
        >>> XGBScalingConfig(num_workers=2, num_cpu_per_worker=1)
    """


class LightGBMScalingConfig(ScalingConfig):
    """How many workers train a LightGBM model, and with what.

    Example:
        >>> LightGBMScalingConfig(num_workers=2, num_cpu_per_worker=1)
    """


@dataclass(frozen=True, slots=True)
class GangSize:
    """What a gang claims.

    Args:
        num_workers: Number of workers.
        cpus_per_worker: CPUs that each claims from Ray; less than its threads where Ray Data reads beside it.
        threads: Threads that each trains with.
        gpus_per_worker: GPUs that each claims, 0 or 1.
    """

    num_workers: int
    cpus_per_worker: float
    threads: int
    gpus_per_worker: int


def resolve_size(
    config: ScalingConfig,
    nodes: Sequence[Node],
    *,
    device: str | None = None,
    cpu_fraction: float = 1.0,
    clamp: bool = False,
) -> GangSize:
    """Compute the number of workers and the size of each from a scaling config.

    All workers of a gang are of one size. With ``num_cpu_per_worker=-1`` the workers are assigned to the nodes (one to
    each, or one to each GPU, with ``num_workers=-1``; else each to the node that has the most CPUs left for it), a
    node's CPUs are divided by its workers, and the smallest share is everybody's.

    Args:
        config: What was asked for.
        nodes: The active nodes.
        device: the library's device parameter, if the user gave one; ``cpu`` or ``cuda``.
        cpu_fraction: Share of a worker's CPUs that it claims itself, in (0, 1]; the rest is left to whatever reads its
            data.
        clamp: Reduce what is too much, with a warning, instead of refusing it.

    Returns:
        The size of the gang.

    Raises:
        InvalidArgumentError: If `device` contradicts ``use_gpu``.
        CapacityError: If the active nodes cannot hold what was asked for.
    """
    use_gpu = gpu_wish(config, device)
    if use_gpu is None:
        use_gpu = bool(nodes) and all(node["gpus"] >= 1 for node in nodes)
    gpus = 1 if use_gpu else 0
    rooms = [node for node in nodes if node["cpus"] >= 1 and node["gpus"] >= gpus]
    if not rooms:
        what = "a GPU and a CPU" if use_gpu else "a CPU"
        raise CapacityError(
            f"no active node has {what} for a worker ({_describe(nodes)}): add some with shoal.scale_cluster"
        )

    per_worker = 1 if config.num_cpu_per_worker == -1 else config.num_cpu_per_worker
    largest = max(node["cpus"] for node in rooms)
    if per_worker > largest:
        _refuse_or_warn(
            clamp,
            f"num_cpu_per_worker={per_worker} is more than any active node has ({_describe(nodes)})",
            f"{largest}",
        )
        per_worker = largest
    room = sum(_workers_on(node, per_worker, gpus) for node in rooms)
    wanted = config.num_workers
    if wanted == -1:
        wanted = sum(node["gpus"] for node in rooms) if use_gpu else len(rooms)
    if wanted > room:
        each = f"{per_worker} CPU{'s' if per_worker > 1 else ''}" + (" and 1 GPU" if use_gpu else "")
        _refuse_or_warn(
            clamp,
            f"{wanted} workers of {each} are more than the active nodes hold, which is {room} ({_describe(nodes)})",
            f"{room}",
        )
        wanted = room
    if config.num_cpu_per_worker == -1:
        each_node = [node["gpus"] if use_gpu else 1 for node in rooms]
        assigned = each_node if wanted == sum(each_node) and config.num_workers == -1 else _assign(rooms, wanted, gpus)
        per_worker = min(node["cpus"] // count for node, count in zip(rooms, assigned, strict=True) if count)
    claimed = per_worker * cpu_fraction
    return GangSize(wanted, claimed, max(1, int(claimed)), gpus)


def gpu_wish(config: ScalingConfig, device: str | None) -> bool | None:
    """Whether GPUs are wanted, by config and the library's device parameter; None if neither says.

    Raises:
        InvalidArgumentError: If they contradict each other.
    """
    if device is None:
        return config.use_gpu
    on_gpu = device.startswith(("cuda", "gpu"))
    if config.use_gpu is not None and config.use_gpu != on_gpu:
        raise InvalidArgumentError(
            f'params hold device="{device}", the scaling config use_gpu={config.use_gpu}: leave one of them out'
        )
    return on_gpu


def _workers_on(node: Node, cpus: int, gpus: int) -> int:
    fit = node["cpus"] // cpus
    return min(fit, node["gpus"]) if gpus else fit


def _assign(rooms: Sequence[Node], workers: int, gpus: int) -> list[int]:
    """Assign each worker to the node that has the most CPUs left for it; return the number of workers per node."""
    assigned = [0] * len(rooms)
    for _ in range(workers):
        _, best = max(
            (node["cpus"] / (assigned[i] + 1), -i)
            for i, node in enumerate(rooms)
            if assigned[i] < _workers_on(node, 1, gpus)
        )
        assigned[-best] += 1
    return assigned


def _refuse_or_warn(clamp: bool, problem: str, instead: str) -> None:
    if not clamp:
        raise CapacityError(
            f"{problem}: add nodes with shoal.scale_cluster, ask for less, or set RunConfig(clamp=True)"
        )
    warnings.warn(f"{problem}: reduced to {instead}", stacklevel=3)


def _describe(nodes: Sequence[Node]) -> str:
    sizes = ", ".join(
        f"{node['name']}: {node['cpus']} CPUs" + (f" {node['gpus']} GPUs" if node["gpus"] else "") for node in nodes
    )
    return f"{len(nodes)} active: {sizes}" if nodes else "none is active"
