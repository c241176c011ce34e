from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

POOL = "local://wide?max_nodes=3"
JOB = {"dataset": {"paths": ["/data/{{ ds }}.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def too_many_workers():
    with pool_for_run(size=2, pool_name=POOL):
        spec = {**JOB, "scaling_config": {"num_workers": 8}}
        DistributedTrainOperator(task_id="train", spec=spec, pool_name=POOL)  # wrong: wrong-argument


too_many_workers()
