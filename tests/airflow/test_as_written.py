"""By what a retry recognises the job of its task: by the task as the DAG file has it, and not as Airflow renders it."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG, task

from shoal.airflow.operators import BatchPredictOperator, DistributedTrainOperator, ScaleClusterOperator, TuneOperator
from shoal.airflow.operators.base import digest_as_written
from tests.support.job_store import POOL

DATA = {"dataset_map": {"train": {"paths": ["/data/{{ ds }}"]}}}
FIELDS = {"dataset": {"paths": ["/d"]}, "input_cols": ["a"], "label_col": "y"}
BOOSTING = {"train_func": None, "op_args": None, "spec": FIELDS}


def digest(make, rendered=(), **given) -> str:
    """The digest in a task of a DAG that `make` has filled, after Airflow has rendered and mapped it."""
    with DAG("a_dag", schedule=None) as dag:
        make(**given)
    (written,) = (each for each in dag.tasks if each.task_id == "train")
    if written.is_mapped:
        running = written.unmap({"op_kwargs": {"number": 7}} if make is decorated else {"op_args": [7]})
    else:
        running = written.prepare_for_execution()
    for name, value in dict(rendered).items():
        setattr(running, name, value)
    return digest_as_written(running)


def train(train_func=len, op_args=("{{ ds }}",), spec=DATA, **others):
    DistributedTrainOperator(
        task_id="train", train_func=train_func, op_args=op_args, spec=spec, pool_name=POOL, **others
    )


def predict(dataset="/data/{{ ds }}"):
    BatchPredictOperator(task_id="train", model="models:/m@a", dataset={"paths": [dataset]}, output_path="/o")


def tune(trials=2, **others):
    TuneOperator(task_id="train", **{"train": FIELDS, "space": {"eta": [0.1, 0.3]}, "trials": trials, **others})


def scale(plan_for):
    ScaleClusterOperator(task_id="train", expected_cluster_size="auto", plan_for=plan_for, pool_name=POOL)


def decorated(rate=1, expanded=None, values=(1, 2)):
    def function(number):
        return number * rate

    made = task.distributed(task_id="train", pool_name=POOL)(function)
    if expanded is None:
        made(first())
    else:
        made.expand(number=list(values))


@task
def first():
    return 1


def mapped(train_func=len, values=([1], [2])):
    DistributedTrainOperator.partial(task_id="train", train_func=train_func, pool_name=POOL).expand(
        op_args=list(values)
    )


def one(rows):
    return rows[0]


def two(rows):
    return rows[1]


@pytest.mark.parametrize(
    ("make", "given", "rendered"),
    [
        (train, {}, {"op_args": ["2013-01-01"], "spec": {"dataset_map": {}}}),
        (predict, {}, {"dataset": {"paths": ["/data/2013-01-01"]}}),
        (decorated, {}, {"op_args": [1], "op_kwargs": {"run_id": "a"}}),
        (decorated, {"expanded": True}, {"op_args": [1]}),
        (mapped, {}, {}),
    ],
)
def test_rendered_and_mapped_values_do_not_count(make, given, rendered):
    assert digest(make, rendered, **given) == digest(make, **given)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (train, {"train_func": one}, {"train_func": two}),
        (train, {"train_func": "pkg:one"}, {"train_func": "pkg:two"}),
        (train, {}, {"op_args": ["{{ ts }}"]}),
        (train, {}, {"spec": {"dataset_map": {"train": {"paths": ["/others/{{ ds }}"]}}}}),
        (train, {**BOOSTING, "framework": "xgboost"}, {**BOOSTING, "framework": "lightgbm"}),
        (predict, {}, {"dataset": "/others/{{ ds }}"}),
        (tune, {}, {"trials": 3}),
        (tune, {}, {"space": {"eta": [0.1, 0.2]}}),
        (tune, {}, {"train": FIELDS | {"label_col": "z"}}),
        (tune, {}, {"spec": {"metric": "mae"}}),
        (decorated, {"rate": 1}, {"rate": 2}),
        (decorated, {"expanded": True}, {"expanded": True, "rate": 2}),
        (decorated, {"expanded": True}, {"expanded": True, "values": (3, 4)}),
        (mapped, {"train_func": one}, {"train_func": two}),
        (mapped, {}, {"values": ([1], [3])}),
        (scale, {"plan_for": FIELDS}, {"plan_for": FIELDS | {"label_col": "z"}}),
    ],
)
def test_the_function_and_the_arguments_count(make, before, after):
    assert digest(make, **before) != digest(make, **after)


def test_the_text_of_a_script_counts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    before = digest(train, train_func=str(script))
    script.write_text("print(2)")
    assert digest(train, train_func=str(script)) != before
