from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule="@daily", params={"rounds": 0})
def wrong_default_of_a_param():  # wrong: wrong-argument
    with pool_for_run(size=2, pool_name="retrain"):
        spec = {**JOB, "n_estimators": "{{ params.rounds }}"}
        DistributedTrainOperator(task_id="train", spec=spec, pool_name="retrain")


wrong_default_of_a_param()
