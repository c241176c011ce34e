"""Provide the Prefect block `ComputePool`, Prefect tasks, the context manager `pool_lease` and clean-up hooks.

Each public name of this package is a thin wrapper around a function of shoal, such as `shoal.scale_cluster`,
`shoal.jobs.submit` and `shoal.jobs.clean_up`.

Example:
    >>> from prefect import flow
    >>> from shoal.prefect import clean_up_run, distributed_train, pool_lease
    >>>
    >>> @flow(on_failure=[clean_up_run], on_crashed=[clean_up_run], on_cancellation=[clean_up_run])
    ... def retrain():
    ...     with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
    ...         return distributed_train(spec, pool_name="retrain")
"""

from __future__ import annotations

from shoal.prefect.blocks import ComputePool
from shoal.prefect.clean_up import clean_up_ended_runs, clean_up_run
from shoal.prefect.events import emit_alerts
from shoal.prefect.lease import pool_lease
from shoal.prefect.tasks import (
    abatch_predict,
    acleanup_pool,
    adistributed_train,
    aget_nodes,
    ascale_cluster,
    await_for_nodes,
    batch_predict,
    cleanup_pool,
    distributed_train,
    get_nodes,
    scale_cluster,
    wait_for_nodes,
)

__all__ = [
    "ComputePool",
    "abatch_predict",
    "acleanup_pool",
    "adistributed_train",
    "aget_nodes",
    "ascale_cluster",
    "await_for_nodes",
    "batch_predict",
    "clean_up_ended_runs",
    "clean_up_run",
    "cleanup_pool",
    "distributed_train",
    "emit_alerts",
    "get_nodes",
    "pool_lease",
    "scale_cluster",
    "wait_for_nodes",
]
