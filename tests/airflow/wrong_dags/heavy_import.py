import pyarrow as pa  # wrong: heavy-import
from airflow.sdk import dag, task


@dag(schedule=None)
def heavy_import():
    @task
    def rows() -> int:
        return pa.table({}).num_rows

    rows()


heavy_import()
