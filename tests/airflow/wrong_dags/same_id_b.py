from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import dag


@dag(schedule=None)
def same_id():  # wrong: duplicate-dag
    EmptyOperator(task_id="one")


same_id()
