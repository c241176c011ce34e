"""What a task after several trainings gets from them: results, and the causes of those that have none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow import results
from shoal.airflow.operators import DistributedTrainOperator, LeasePoolOperator
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import CAUSE, training_results
from shoal.airflow.sensors import NodesSensor
from shoal.errors import PoolNotFoundError
from shoal.jobs import NoResult

SPEC = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}


def a_dag() -> DAG:
    """A foreign task, a lease and a training, one after the other, and two trainings beside them."""
    with DAG("a_dag", schedule=None) as dag:
        prepare = EmptyOperator(task_id="prepare")
        with pool_for_run(size=1, pool_name="local://p") as pool:
            for name in ("train", "one", "two"):
                DistributedTrainOperator(task_id=name, pool_name="local://p", spec=SPEC)
        prepare >> pool.setup
    return dag


@pytest.fixture
def ran(monkeypatch):
    """Sets the states and XComs of the tasks of a run, as a task of this run sees them."""
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://airflow")

    def of(states, xcoms):
        ti = SimpleNamespace(
            dag_id="a_dag",
            run_id="a_run",
            get_task_states=lambda dag_id, run_ids, task_ids: {
                "a_run": {
                    name: state
                    for name, state in states.items()
                    if name.rpartition("_")[0] in task_ids or name in task_ids
                }
            },
            xcom_pull=lambda task_ids, key="return_value", map_indexes=None: xcoms.get((task_ids, map_indexes, key)),
        )
        monkeypatch.setattr(results, "get_current_context", lambda: {"ti": ti, "dag": a_dag()})

    return of


LOG = "see its log, http://airflow/dags/a_dag/runs/a_run/tasks"


def test_instances_of_a_mapped_task_are_in_their_order(ran):
    ran(
        {"train_0": "success", "train_1": "failed", "train_2": "skipped", "train_3": "failed"},
        {
            ("train", 0, "return_value"): {"job_id": "a"},
            ("train", 1, CAUSE): "no rows",
            ("train", 2, CAUSE): "nothing new",
        },
    )
    assert training_results("train", mapped=4) == [
        {"job_id": "a"},
        NoResult("no rows"),
        NoResult("nothing new", skipped=True),
        NoResult(f"task train[3] ended as failed: {LOG}/train/mapped/3"),
    ]


def test_a_task_that_did_not_run_names_what_failed_before_it(ran):
    ran(
        {"one": "success", "lease_pool": "failed", "two": "upstream_failed", "train": None},
        {("one", -1, "return_value"): {"job_id": "a"}, ("lease_pool", -1, CAUSE): "no room for 4 nodes"},
    )
    why = NoResult("task lease_pool failed: no room for 4 nodes")
    assert training_results("one", "two", "train") == [{"job_id": "a"}, why, why]
    assert training_results("train", mapped=1) == [why]  # it was never expanded


def test_of_a_task_that_is_not_shoals_name_state_and_log_are_known(ran):
    ran({"prepare": "failed", "lease_pool": "upstream_failed", "train": "upstream_failed"}, {})
    assert training_results("train") == [NoResult(f"task prepare failed: {LOG}/prepare")]
    ran({"prepare": "success"}, {})
    assert training_results("train") == [NoResult(f"task train has not run: {LOG}/train")]


@pytest.fixture
def pushed(context, monkeypatch):
    """The XComs that a task pushes."""
    found: dict[str, object] = {}
    context["ti"].xcom_push = lambda key, value: found.update({key: value})
    monkeypatch.setattr(results, "get_current_context", lambda: context)
    return found


def wrong_training() -> DistributedTrainOperator:
    """A task of which an earlier task has returned a wrong spec."""
    operator = DistributedTrainOperator(task_id="train", spec="{{ ti.xcom_pull('prepare') }}")
    operator.spec = {"input_cols": ["x"]}
    return operator


def test_a_failed_training_leaves_its_cause(context, pushed):
    with pytest.raises(AirflowFailException):
        wrong_training().execute(context)
    assert "dataset is missing" in pushed[CAUSE]


@pytest.mark.parametrize(
    ("operator", "arguments", "method"),
    [(LeasePoolOperator, {"size": 1}, "execute"), (NodesSensor, {"expected_nodes": 1}, "poke")],
)
def test_a_failed_setup_or_sensor_leaves_its_cause(context, pushed, fresh_home, operator, arguments, method):
    with pytest.raises(PoolNotFoundError):
        getattr(operator(task_id="nodes", pool_name="nowhere", **arguments), method)(context)
    assert "nowhere" in pushed[CAUSE]


def test_a_cause_that_cannot_be_stored_does_not_hide_it(context, pushed):
    def refuse(key, value):
        raise ConnectionError("no API server")

    context["ti"].xcom_push = refuse
    with pytest.raises(AirflowFailException, match="dataset is missing"):
        wrong_training().execute(context)
