from airflow.sdk import dag

from shoal.airflow.operators import PromoteModelOperator

CREDENTIALS = {"credential_conn_ids": ["no_such_mlflow"]}


@dag(schedule="@daily")
def unknown_connection_of_a_promotion():
    PromoteModelOperator(task_id="promote", training="a-job", **CREDENTIALS)  # wrong: unknown-connection


unknown_connection_of_a_promotion()
