from airflow.sdk import dag, task

from shoal.airflow.pool_for_run import pool_for_run

POOL = "local://small?max_nodes=1&ray=false"


@dag(schedule=None)
def without_ray():
    @task.distributed(num_workers=2, gpus=2, pool_name=POOL)  # wrong: wrong-argument
    def train() -> int:
        return 1

    with pool_for_run(size=1, pool_name=POOL):
        train()


without_ray()
