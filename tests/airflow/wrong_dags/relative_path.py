from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def relative_path():
    with pool_for_run(size=2, pool_name="retrain"):
        spec = {**JOB, "dataset": {"paths": ["x.parquet"]}}
        DistributedTrainOperator(task_id="train", spec=spec, pool_name="retrain")  # wrong: wrong-argument


relative_path()
