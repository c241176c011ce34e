"""The public API of compute pools: the class `ComputePool`, and plain functions such as `scale_cluster`."""

from shoal.pool.api.compute_pool import ComputePool as ComputePool
from shoal.pool.api.functions import alter_pool as alter_pool
from shoal.pool.api.functions import describe_pool as describe_pool
from shoal.pool.api.functions import get_nodes as get_nodes
from shoal.pool.api.functions import list_pools as list_pools
from shoal.pool.api.functions import report_pools as report_pools
from shoal.pool.api.functions import scale_cluster as scale_cluster
from shoal.pool.api.functions import sweep_nodes as sweep_nodes
