from airflow.sdk import dag
from no_such_package import client  # wrong: import-error


@dag(schedule=None)
def missing_module():
    client.tasks()


missing_module()
