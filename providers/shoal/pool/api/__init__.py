"""The public API of compute pools: the class `ComputePool`, and plain functions such as `scale_cluster`."""

from shoal.pool.api.compute_pool import ComputePool
from shoal.pool.api.functions import (
    alter_pool,
    describe_pool,
    get_nodes,
    list_pools,
    report_pools,
    scale_cluster,
    sweep,
    sweep_nodes,
)

__all__ = [
    "ComputePool",
    "alter_pool",
    "describe_pool",
    "get_nodes",
    "list_pools",
    "report_pools",
    "scale_cluster",
    "sweep",
    "sweep_nodes",
]
