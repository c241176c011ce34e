from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.pool_for_run import pool_for_run

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def more_nodes_than_the_pool_has():
    with pool_for_run(size=9, pool_name="local://retrain?max_nodes=2"):  # wrong: wrong-argument
        DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")


more_nodes_than_the_pool_has()
