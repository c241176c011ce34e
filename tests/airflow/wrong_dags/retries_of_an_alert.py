from datetime import timedelta

from airflow.sdk import dag

from shoal.airflow.operators import CheckModelsOperator


@dag(schedule=None)
def retries_of_an_alert():
    CheckModelsOperator(task_id="check", promoted_within=timedelta(days=9), retries=2)  # wrong: useless-retries


retries_of_an_alert()
