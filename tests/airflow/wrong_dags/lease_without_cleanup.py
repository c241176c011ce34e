from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator, LeasePoolOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def lease_without_cleanup():
    lease = LeasePoolOperator(task_id="lease", size=2, pool_name="retrain")  # wrong: no-cleanup
    lease >> DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")


lease_without_cleanup()
