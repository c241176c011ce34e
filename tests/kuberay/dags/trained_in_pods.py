"""A training whose tasks are pods of Airflow's Kubernetes executor."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

SPEC = {
    "dataset": {"paths": ["{{ params.folder }}/rows.parquet"]},
    "input_cols": ["a", "b"],
    "label_col": "y",
    "params": {"objective": "reg:squarederror", "max_depth": 2},
    "n_estimators": 20000,
    "run_config": {"artifact_location": "{{ params.folder }}/results"},
}


@dag(schedule=None, params={"folder": ""}, default_args={"retries": 1, "retry_delay": timedelta(seconds=1)})
def trained_in_pods() -> None:
    """Lease two nodes of the pool in the connection `retrain`, and train."""
    with pool_for_run(size=2, compute_pool_conn_id="retrain"):
        DistributedTrainOperator(task_id="train", spec=SPEC, compute_pool_conn_id="retrain")


trained_in_pods()
