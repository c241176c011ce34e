from airflow.sdk import dag, task


@dag(schedule=None)
def decorated_without_lease():
    @task.distributed(num_workers=2, pool_name="retrain")
    def rank() -> int:  # wrong: no-lease
        return 0

    rank()


decorated_without_lease()
