"""shoal trains XGBoost, LightGBM and PyTorch models on elastic compute pools, from Airflow, Prefect or Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from shoal.kinds.training.pool_plan import plan as plan
    from shoal.pool.api import ComputePool as ComputePool
    from shoal.pool.api import alter_pool as alter_pool
    from shoal.pool.api import describe_pool as describe_pool
    from shoal.pool.api import get_nodes as get_nodes
    from shoal.pool.api import scale_cluster as scale_cluster
    from shoal.pool.spec import PoolSpec as PoolSpec
    from shoal.pool.status import PoolStatus as PoolStatus
    from shoal.training.run_config import RunConfig as RunConfig

__version__ = "0.1.0"

__getattr__ = lazy_exports(__name__)
