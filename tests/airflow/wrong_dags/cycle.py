# wrong in the file: cycle
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import dag


@dag(schedule=None)
def cycle():
    first, second = EmptyOperator(task_id="first"), EmptyOperator(task_id="second")
    first >> second >> first


cycle()
