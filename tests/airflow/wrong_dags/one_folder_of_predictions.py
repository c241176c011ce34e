from airflow.sdk import dag

from shoal.airflow.operators import BatchPredictOperator
from shoal.airflow.pool_for_run import pool_for_run

TODAY = {"model": "models:/m@champion", "dataset": {"paths": ["/data/today.parquet"]}, "pool_name": "retrain"}


@dag(schedule="@daily")
def one_folder_of_predictions():
    with pool_for_run(size=2, pool_name="retrain"):
        BatchPredictOperator(task_id="predict", output_path="/data/predictions", **TODAY)  # wrong: wrong-argument
        BatchPredictOperator(task_id="replace", output_path="/data/last", spec={"overwrite": True}, **TODAY)
        partial = BatchPredictOperator.partial(
            task_id="each",  # wrong: wrong-argument
            model="models:/m@champion",
            output_path="/data/{{ ds }}",
            pool_name="retrain",
        )
        partial.expand(dataset=[{"paths": ["/data/a.parquet"]}, {"paths": ["/data/b.parquet"]}])


one_folder_of_predictions()
