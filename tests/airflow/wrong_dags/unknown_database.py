from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.sdk import dag


@dag(schedule=None)
def unknown_database():
    SQLExecuteQueryOperator(task_id="count", sql="SELECT 1", conn_id="no_such_database")  # wrong: unknown-connection


unknown_database()
