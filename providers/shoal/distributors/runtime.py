"""Provide functions that return the ranks of this process and the number of processes of the run. The functions have
the same names as in Databricks' `serverless_gpu.runtime`.

Outside a gang (the group of workers of one run), a process has rank 0, and the world size is 1.
"""

from __future__ import annotations

from shoal.training.pytorch.context import get_context

__all__ = ["get_global_rank", "get_local_rank", "get_local_world_size", "get_node_rank", "get_world_size"]


def get_global_rank() -> int:
    """Return the rank of this process among all processes of the run; the first process has rank 0."""
    return get_context().get_rank()


def get_local_rank() -> int:
    """Return the rank of this process among the processes on its node; the first process has rank 0."""
    return get_context().get_local_rank()


def get_world_size() -> int:
    """Return the number of processes of the run."""
    return get_context().get_world_size()


def get_local_world_size() -> int:
    """Return the number of processes on this node."""
    return get_context().get_local_world_size()


def get_node_rank() -> int:
    """Return the number of this node among the nodes of the run; the first node has number 0."""
    return get_context().get_node_rank()
