"""Create the environment variables of torchrun for the workers, so that code for torchrun runs without changes.

:func:`run_local` runs a training function with these variables in this process, for debugging.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.data.connector import DataConnector
from shoal.os_processes import variables_set
from shoal.training.pytorch.context import Context, set_context


@dataclass(frozen=True, slots=True)
class Machine:
    """Node, address and GPUs of one worker, from which the worker's environment variables are built.

    Args:
        node: Id of the worker's node.
        address: Address of the node.
        gpus: GPUs assigned to the worker, in the format of CUDA_VISIBLE_DEVICES.
        port: Port of the store (PyTorch's key-value server) by which the ranks find each other. Only rank 0 has a
            store; the port of all other ranks is 0.
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()
    port: int = 0


def environments(
    machines: Sequence[Machine], *, threads: int, restarts: int, max_restarts: int, is_launcher: bool = False
) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank.

    Args:
        machines: Node, address and GPUs of each rank.
        is_launcher: Whether the program is not a rank, but starts others itself. It then gets no variables of a rank:
            scripts and libraries that find `RANK` would wait for a process group.
    """
    if is_launcher:
        return [{"OMP_NUM_THREADS": str(threads), **_visible_gpus(machines, machine.node)} for machine in machines]
    nodes = list(dict.fromkeys(machine.node for machine in machines))
    on_node = Counter(machine.node for machine in machines)
    first, world = machines[0], len(machines)
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(sum(other.node == machine.node for other in machines[:rank])),
            "LOCAL_WORLD_SIZE": str(on_node[machine.node]),
            "GROUP_RANK": str(nodes.index(machine.node)),
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world),
            "ROLE_NAME": "default",
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(first.port),
            "TORCHELASTIC_RUN_ID": "shoal",
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            # By default, rank 0 starts PyTorch's key-value server (the store). shoal has already started the server, so
            # that no other process can take the port. With TORCHELASTIC_USE_AGENT_STORE, rank 0 connects to this server
            # as a client, like all other ranks.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
            **_visible_gpus(machines, machine.node),
        }
        for rank, machine in enumerate(machines)
    ]


def _visible_gpus(machines: Sequence[Machine], node: str) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of all workers on a node, so that ``cuda:{LOCAL_RANK}`` works as in
    torchrun.

    The GPUs are in the order of the local ranks.
    """
    gpus = [gpu for machine in machines if machine.node == node for gpu in machine.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


_THREADS = 1


def run_local(
    function: Callable[..., Any],
    *args: Any,
    dataset_map: Mapping[str, DataConnector] | None = None,
    hyper_params: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function in this process as the only worker of a run, with the environment variables and context of a
    worker.

    Breakpoints work, no object is pickled, and no pool is needed.

    Example:
        >>> from shoal.distributors.pytorch import get_context, run_local
        >>> run_local(lambda: get_context().get_world_size())
        1
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine = Machine("here", "127.0.0.1", port=server.getsockname()[1])
    [environment] = environments([machine], threads=_THREADS, restarts=0, max_restarts=0)
    # TORCHELASTIC_USE_AGENT_STORE tells PyTorch that its key-value server (the store) is already running. In a local
    # run no server is running, so the variable is removed, and PyTorch starts the server itself.
    del environment["TORCHELASTIC_USE_AGENT_STORE"]
    with variables_set(environment):
        set_context(Context(dataset_map, hyper_params))
        try:
            return function(*args, **kwargs)
        finally:
            set_context(None)
            _leave_group()


def _leave_group() -> None:
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
