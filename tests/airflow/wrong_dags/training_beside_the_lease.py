from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def training_beside_the_lease():
    with pool_for_run(size=2, pool_name="retrain"):
        DistributedTrainOperator(task_id="first", spec=JOB, pool_name="retrain")
    DistributedTrainOperator(task_id="second", spec=JOB, pool_name="retrain")  # wrong: no-lease


training_beside_the_lease()
