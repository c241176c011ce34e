# wrong in the file: heavy-import
from airflow.sdk import dag, task
from helpers.tables import version


@dag(schedule=None)
def heavy_import_in_a_module():
    task(version)()


heavy_import_in_a_module()
