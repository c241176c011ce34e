"""What a task after several trainings gets from them: results, and the causes of those that have none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow import results
from shoal.airflow.operators import DistributedTrainOperator
from shoal.airflow.results import CAUSE, training_results
from shoal.jobs import NoResult


@pytest.fixture
def ran(monkeypatch):
    """Sets the states and XComs of the tasks of a run, as a task of this run sees them."""

    def of(states, xcoms):
        ti = SimpleNamespace(
            dag_id="a_dag",
            run_id="a_run",
            get_task_states=lambda dag_id, run_ids, task_ids: {"a_run": states},
            xcom_pull=lambda task_id, key="return_value", map_indexes=None: xcoms.get((task_id, map_indexes, key)),
        )
        monkeypatch.setattr(results, "get_current_context", lambda: {"ti": ti})

    return of


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
        NoResult("task train with map index 3 ended as failed: see its log"),
    ]


def test_tasks_that_are_not_mapped(ran):
    ran({"one": "success", "two": "upstream_failed"}, {("one", -1, "return_value"): {"job_id": "a"}})
    assert training_results("one", "two") == [
        {"job_id": "a"},
        NoResult("task two ended as upstream_failed: see its log"),
    ]


def test_a_mapped_task_that_was_never_expanded(ran):
    ran({"train": "upstream_failed"}, {})
    assert training_results("train", mapped=1) == [
        NoResult("task train with map index 0 ended as upstream_failed: see its log")
    ]


def wrong_training() -> DistributedTrainOperator:
    """A task of which an earlier task has returned a wrong spec."""
    operator = DistributedTrainOperator(task_id="train", spec="{{ ti.xcom_pull('prepare') }}")
    operator.spec = {"input_cols": ["x"]}
    return operator


def test_a_failed_training_leaves_its_cause(context):
    pushed = {}
    context["ti"].xcom_push = lambda key, value: pushed.update({key: value})
    with pytest.raises(AirflowFailException):
        wrong_training().execute(context)
    assert "dataset is missing" in pushed[CAUSE]


def test_a_cause_that_cannot_be_stored_does_not_hide_it(context):
    def refuse(key, value):
        raise ConnectionError("no API server")

    context["ti"].xcom_push = refuse
    with pytest.raises(AirflowFailException, match="dataset is missing"):
        wrong_training().execute(context)
