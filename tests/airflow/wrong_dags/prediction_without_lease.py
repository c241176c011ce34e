from airflow.sdk import dag

from shoal.airflow.operators import BatchPredictOperator


@dag(schedule=None)
def prediction_without_lease():
    BatchPredictOperator(
        task_id="predict",  # wrong: no-lease
        model="models:/m/1",
        dataset={"paths": ["/data/x.parquet"]},
        output_path="/out",
        pool_name="local://retrain",
    )


prediction_without_lease()
