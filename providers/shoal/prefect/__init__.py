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

from shoal.prefect.blocks import ComputePool as ComputePool
from shoal.prefect.job_task import retry_unless_permanent as retry_unless_permanent
from shoal.prefect.lease import clean_up_ended_runs as clean_up_ended_runs
from shoal.prefect.lease import clean_up_run as clean_up_run
from shoal.prefect.lease import pool_lease as pool_lease
from shoal.prefect.reports import emit_alerts as emit_alerts
from shoal.prefect.tasks import abatch_predict as abatch_predict
from shoal.prefect.tasks import acleanup_pool as acleanup_pool
from shoal.prefect.tasks import adistributed_train as adistributed_train
from shoal.prefect.tasks import aget_nodes as aget_nodes
from shoal.prefect.tasks import amany_models as amany_models
from shoal.prefect.tasks import apromote_model as apromote_model
from shoal.prefect.tasks import ascale_cluster as ascale_cluster
from shoal.prefect.tasks import atune as atune
from shoal.prefect.tasks import await_for_nodes as await_for_nodes
from shoal.prefect.tasks import batch_predict as batch_predict
from shoal.prefect.tasks import cleanup_pool as cleanup_pool
from shoal.prefect.tasks import distributed_train as distributed_train
from shoal.prefect.tasks import get_nodes as get_nodes
from shoal.prefect.tasks import many_models as many_models
from shoal.prefect.tasks import promote_model as promote_model
from shoal.prefect.tasks import scale_cluster as scale_cluster
from shoal.prefect.tasks import tune as tune
from shoal.prefect.tasks import wait_for_nodes as wait_for_nodes
