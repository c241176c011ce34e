from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


POOL = {"compute_pool_conn_id": "no_such_pool"}


@dag(schedule=None)
def unknown_connection():  # wrong: unknown-connection
    with pool_for_run(size=2, **POOL):
        DistributedTrainOperator(task_id="train", spec=JOB, **POOL)  # wrong: unknown-connection


unknown_connection()
