from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {
    "dataset": {"paths": ["s3://no_such_lake@air/rows"]},
    "input_cols": ["x"],
    "label_col": "y",
}


@dag(schedule=None)
def unknown_storage_of_a_dataset():
    with pool_for_run(size=2, pool_name="retrain"):
        DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")  # wrong: unknown-connection


unknown_storage_of_a_dataset()
