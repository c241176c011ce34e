from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def mapped_without_lease():
    DistributedTrainOperator.partial(task_id="train", pool_name="retrain").expand(spec=[JOB])  # wrong: no-lease


mapped_without_lease()
