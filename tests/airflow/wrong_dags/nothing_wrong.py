"""DAGs that look like the wrong ones, and have no problem."""

from datetime import timedelta

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import dag, task

from shoal.airflow.hooks import ComputePoolHook
from shoal.airflow.operators import (
    CheckModelsOperator,
    CleanupPoolOperator,
    DistributedTrainOperator,
    LeasePoolOperator,
    PromoteModelOperator,
    ScaleClusterOperator,
)
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import no_retry_of_permanent_errors

JOB = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


@dag(schedule="@daily", params={"rounds": 5}, default_args={"retries": 3})
def only_the_run_knows():
    with pool_for_run(size=2, pool_name="{{ var.value.pool }}"):
        for number, rounds in enumerate(
            ["params.rounds", "dag_run.conf['rounds']", "var.value.rounds", "ti.try_number"]
        ):
            spec = {**JOB, "n_estimators": f"{{{{ {rounds} }}}}"}
            DistributedTrainOperator(task_id=f"train_{number}", spec=spec, pool_name="{{ var.value.pool }}")


@dag(schedule=None, params={"rounds": 0})
def a_person_gives_the_params():
    with pool_for_run(size=2, pool_name="retrain"):
        spec = {**JOB, "n_estimators": "{{ params.rounds }}"}
        DistributedTrainOperator.partial(task_id="train", pool_name="local://retrain").expand(spec=[spec])


@dag(schedule="@daily")
def the_night():
    ScaleClusterOperator(task_id="shrink", expected_cluster_size=1, compute_pool_conn_id="only_in_production")


@dag(schedule=None)
def given_back():
    lease = LeasePoolOperator(task_id="lease", size=2, pool_name="local://retrain")
    clean_up = CleanupPoolOperator(task_id="clean_up", pool_name="retrain", trigger_rule="all_done")
    grow = ScaleClusterOperator(task_id="grow", expected_cluster_size=3, pool_name="retrain")
    shrink = ScaleClusterOperator(task_id="shrink", expected_cluster_size=1, pool_name="retrain")
    train = DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")
    lease >> train >> clean_up
    grow >> train >> shrink.as_teardown(setups=grow)


@dag(schedule=None)
def always_up():
    DistributedTrainOperator(task_id="train", spec=JOB, pool_name="always-up")


@dag(schedule=None, default_args={"retries": 3})
def retries():
    @task
    @no_retry_of_permanent_errors()
    def decorated() -> int:
        return len(ComputePoolHook(pool_name="retrain").pool().get_nodes())

    @task
    def inside() -> int:
        with no_retry_of_permanent_errors():
            return len(ComputePoolHook(pool_name="retrain").pool().get_nodes())

    @task(retries=0)
    def is_not_retried() -> int:
        return len(ComputePoolHook(pool_name="retrain").pool().get_nodes())

    decorated() >> inside() >> is_not_retried()
    CheckModelsOperator(task_id="check", promoted_within=timedelta(days=9), retries=0)


@dag(schedule=None)
def a_person_approves():
    with pool_for_run(size=2, pool_name="retrain"):
        train = DistributedTrainOperator(task_id="train", spec=JOB, pool_name="retrain")
    approve = ApprovalOperator(task_id="approve", subject="Promote {{ ti.xcom_pull('train')['model_version'] }}?")
    train >> approve >> PromoteModelOperator(task_id="promote", training=train.output, retries=2)
    PromoteModelOperator(task_id="promote_another", model="{{ params.model }}", version="{{ params.version }}")


only_the_run_knows()
a_person_gives_the_params()
a_person_approves()
the_night()
given_back()
always_up()
retries()
