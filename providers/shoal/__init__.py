"""shoal trains XGBoost, LightGBM and PyTorch models on elastic compute pools, from Airflow, Prefect or Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.pool.api import ComputePool, alter_pool, describe_pool, get_nodes, scale_cluster
    from shoal.pool.spec import PoolSpec
    from shoal.pool.status import PoolStatus
    from shoal.training.run_config import RunConfig

__version__ = "0.1.0"

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

__getattr__ = lazy_exports(__name__)
