from airflow.sdk import dag

from shoal.airflow.sensors import NodesSensor


@dag(schedule=None)
def wrong_connection():
    NodesSensor(task_id="nodes", expected_nodes=2, compute_pool_conn_id="wrong_pool")  # wrong: wrong-argument


wrong_connection()
