from airflow.sdk import dag

from shoal.airflow.pool_for_run import pool_for_run


@dag(schedule=None)
def one_pool_two_uris_a():
    with pool_for_run(size=2, pool_name="local://shared-by-two?max_nodes=2"):
        pass


one_pool_two_uris_a()
