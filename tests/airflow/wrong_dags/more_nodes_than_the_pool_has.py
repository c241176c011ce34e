from airflow.sdk import dag

from shoal.airflow.context import pool_for_run
from shoal.airflow.operators import DistributedTrainOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def more_nodes_than_the_pool_has():
    with pool_for_run(size=9, pool_name="local://retrain?max_nodes=2"):  # wrong: wrong-argument
        DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")


more_nodes_than_the_pool_has()
