from airflow.sdk import dag

from shoal.airflow.operators import CleanupPoolOperator, DistributedTrainOperator, LeasePoolOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def cleanup_of_another_pool():
    lease = LeasePoolOperator(task_id="lease", size=2, pool_name="retrain")  # wrong: no-cleanup
    train = DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")
    lease >> train >> CleanupPoolOperator(task_id="clean_up", pool_name="retrian").as_teardown(setups=lease)


cleanup_of_another_pool()
