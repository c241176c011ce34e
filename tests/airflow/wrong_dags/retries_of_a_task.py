from airflow.sdk import dag, task

from shoal.airflow.hooks import ComputePoolHook


@dag(schedule=None, default_args={"retries": 3})
def retries_of_a_task():
    @task
    def nodes() -> int:  # wrong: useless-retries
        return len(ComputePoolHook(pool_name="retrain").pool().get_nodes())

    @task
    def models() -> int:  # wrong: useless-retries
        from shoal.jobs import submit

        return submit({"label_col": "y"})

    nodes()
    models()


retries_of_a_task()
