from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def lease_of_another_pool():
    with pool_for_run(size=2, pool_name="retrain"):
        DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrian")  # wrong: no-lease


lease_of_another_pool()
