# wrong in the file: import-error
import os

from airflow.sdk import dag


@dag(schedule=None)
def ends_its_process(): ...


os._exit(3)
