"""Which task instances are cleared so that a run trains again what failed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from airflow.models import import_all_models
from airflow.models.base import Base
from airflow.models.dagbundle import DagBundleModel
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.taskmap import TaskMap
from airflow.sdk import DAG, task, task_group
from airflow.serialization.definitions.dag import SerializedDAG
from airflow.serialization.serialized_objects import LazyDeserializedDAG
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.task_decorators import distributed_task
from shoal.airflow.train_again import instances_text, instances_to_clear
from shoal.errors import InvalidArgumentError

RUN = "a_run"


def a_dag() -> DAG:
    """Two mapped trainings in a block, a mapped group in another block, tasks after and beside them."""
    with DAG("a_dag", schedule=None) as dag:

        @task
        def begin() -> list[int]:
            return [0, 1]

        @task(trigger_rule="all_done")
        def report(found: object) -> None:
            pass

        @task_group
        def group(number: int) -> None:
            fit = distributed_task(pool_name="q", task_id="fit")(lambda n: n)(number)
            task(task_id="check")(lambda found: found)(fit)

        begun = begin()
        with pool_for_run(size=1, pool_name="p") as pool:
            trained = distributed_task(pool_name="p", task_id="train")(lambda n: n).expand(n=begun)
        begun >> pool.setup
        report(trained)
        with pool_for_run(size=1, pool_name="q", prefix="score") as other:
            group.expand(number=begun)
        begun >> other.setup
    return dag


@pytest.fixture(scope="module")
def database() -> Iterator[Session]:
    """Airflow's tables in memory, with the DAG and a run in which all instances have succeeded."""
    import_all_models()
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    dag = LazyDeserializedDAG.from_dag(a_dag())
    with Session(engine) as session:
        session.add(DagBundleModel(name="dags"))
        session.flush()
        SerializedDAG.bulk_write_to_db("dags", None, [dag], session=session)
        SerializedDagModel.write_dag(dag, bundle_name="dags", session=session)
        session.commit()
        known = SerializedDagModel.get_dag("a_dag", session=session)
        run = known.create_dagrun(
            run_id=RUN, run_after=datetime(2026, 1, 1, tzinfo=UTC), run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST, state=DagRunState.FAILED, session=session,
        )  # fmt: skip
        for instance in run.get_task_instances(session=session):
            instance.state = "success"
            if instance.task_id in ("train", "group.fit", "group.check"):
                instance.map_index = 0
                one = TaskInstance(known.get_task(instance.task_id), instance.dag_version_id, run_id=RUN, map_index=1)
                one.state = "success"
                session.add(one)
        session.add(TaskMap("a_dag", "begin", RUN, -1, 2, None))
        session.commit()
        yield session
    engine.dispose()


@pytest.mark.parametrize(
    ("failed", "cleared"),
    [
        ({("train", 1)}, "clean_up_pool, lease_pool, report, train[1]"),
        ({("lease_pool", -1), ("train", 0), ("train", 1)}, "clean_up_pool, lease_pool, report, train"),
        (
            {("group.fit", 1), ("group.check", 1)},
            "score_clean_up_pool, score_lease_pool, group.check[1], group.fit[1]",
        ),
        ({("report", -1)}, "report"),
    ],
)
def test_what_failed_is_cleared_with_what_it_needs_and_what_follows(database, failed, cleared):
    for one in database.query(TaskInstance):
        one.state = "failed" if (one.task_id, one.map_index) in failed else "success"
    _, instances = instances_to_clear("a_dag", RUN, database)
    assert instances_text(instances) == cleared
    database.rollback()


def test_without_failures_nothing_is_cleared(database):
    with pytest.raises(InvalidArgumentError, match="no task has failed in run a_run of the DAG a_dag"):
        instances_to_clear("a_dag", RUN, database)
    with pytest.raises(InvalidArgumentError, match="Airflow has no run b_run of the DAG a_dag"):
        instances_to_clear("a_dag", "b_run", database)
