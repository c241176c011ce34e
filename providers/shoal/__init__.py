"""shoal trains XGBoost, LightGBM and PyTorch models on elastic compute pools, from Airflow, Prefect or Python."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.pool.api import ComputePool, alter_pool, describe_pool, get_nodes, scale_cluster
    from shoal.pool.spec import PoolSpec
    from shoal.pool.status import PoolStatus
    from shoal.training.run_config import RunConfig

__version__ = "0.1.0"

# The module that defines each public name. A module is imported only when one of its names is first used, because
# Airflow parses DAG files again and again, so `import shoal` has to be fast.
_HOMES = {
    "ComputePool": "shoal.pool.api",
    "PoolSpec": "shoal.pool.spec",
    "PoolStatus": "shoal.pool.status",
    "RunConfig": "shoal.training.run_config",
    "alter_pool": "shoal.pool.api",
    "describe_pool": "shoal.pool.api",
    "get_nodes": "shoal.pool.api",
    "scale_cluster": "shoal.pool.api",
}

__all__ = [
    "ComputePool",
    "PoolSpec",
    "PoolStatus",
    "RunConfig",
    "__version__",
    "alter_pool",
    "describe_pool",
    "get_nodes",
    "scale_cluster",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
