"""Run a training function in this process for debugging, with the environment variables and context of a worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from shoal.data.connector import DataConnector
from shoal.os_processes import variables_set
from shoal.training.pytorch.context import Context, set_context
from shoal.training.pytorch.environment import Machine, environments

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
    machine = Machine("here", "127.0.0.1", port=_free_port())
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
