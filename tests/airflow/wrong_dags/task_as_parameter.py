from airflow.sdk import dag, task

from shoal.airflow.pool_for_run import pool_for_run


@dag(schedule=None)
def task_as_parameter():
    @task.distributed(pool_name="retrain")
    def train(rate, ti=None):
        return rate, ti.task_id

    with pool_for_run(size=1, pool_name="retrain"):
        train(0.1)  # wrong: wrong-argument


task_as_parameter()
