from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

REGISTER = {"model": "m", "metric": "logloss", "holdout": {"paths": ["/data/holdout.parquet"]}}
JOB = {"dataset": {"paths": ["/data/{{ ds }}.parquet"]}, "input_cols": ["x"], "label_col": "y", "register": REGISTER}


@dag(schedule=None)
def metric_of_another_objective():
    with pool_for_run(size=2, pool_name="retrain"):
        spec = {**JOB, "params": {"objective": "count:poisson"}}
        DistributedTrainOperator(task_id="train", spec=spec, pool_name="retrain")  # wrong: wrong-argument


metric_of_another_objective()
