from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/{{ ds }}.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def misspelt_parameter():
    with pool_for_run(size=2, pool_name="retrain"):
        spec = {**JOB, "params": {"max_dept": 3}}
        DistributedTrainOperator(task_id="train", spec=spec, pool_name="retrain")  # wrong: wrong-argument


misspelt_parameter()
