from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def misspelt_option():
    with pool_for_run(size=2, pool_name="retrain"):
        DistributedTrainOperator(task_id="train", spec={**JOB, "n_estimator": 5})  # wrong: wrong-argument


misspelt_option()
