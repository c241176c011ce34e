from airflow.sdk import dag

from shoal.airflow.operators import DistributedTrainOperator, ScaleClusterOperator

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule=None)
def scale_without_cleanup():
    grow = ScaleClusterOperator(task_id="grow", expected_cluster_size=3, pool_name="retrain")  # wrong: no-cleanup
    shrink = ScaleClusterOperator(task_id="shrink", expected_cluster_size=1, pool_name="retrain")
    grow >> DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain") >> shrink


scale_without_cleanup()
