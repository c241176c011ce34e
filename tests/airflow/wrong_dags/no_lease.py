from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def no_lease():
    DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")  # wrong: no-lease


no_lease()
