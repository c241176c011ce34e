"""What a template gives in a DAG with ``render_template_as_native_obj``: the types of the fields decide."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pendulum
import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.execution_time import task_runner

from shoal.airflow.operators import BatchPredictOperator, DistributedTrainOperator, PromoteModelOperator
from shoal.airflow.operators.job_operator import show_links
from shoal.airflow.task_decorators import context_values, distributed_task
from shoal.data.filters import parse_moment
from shoal.errors import InvalidArgumentError
from shoal.jobs import spec_of

SPEC = {"dataset": {"paths": ["/data/x"]}, "input_cols": ["x"], "label_col": "y"}
CONTEXT = {
    "ds_nodash": "20260101",
    "data_interval_end": pendulum.datetime(2026, 1, 2),
    "params": {"n": 5, "cols": ["a", "b"], "limit": None, "rates": {"eta": 0.1}},
    "ti": type("Ti", (), {"xcom_pull": lambda self, task_id: {**SPEC, "n_estimators": 7}})(),
}


def rendered(native=True, operator=DistributedTrainOperator, **arguments):
    with DAG("a_dag", schedule=None, render_template_as_native_obj=native):
        task = operator(task_id="t", **arguments)
    task.render_template_fields(CONTEXT)
    return task


TEXTS = ["12e45678", "1_000", "2013_01", "007", "None", "[1, 2]", "True", "", "a-{{ ds_nodash }}", "{{ ds_nodash }}"]


@pytest.mark.parametrize("native", [True, False])
def test_arguments_of_a_script_stay_texts(native):
    task = rendered(native, train_func="/train.py", op_args=TEXTS)
    assert task.op_args == [text.replace("{{ ds_nodash }}", "20260101") for text in TEXTS]


def test_values_keep_their_types_where_airflow_gives_them():
    values = [
        "{{ params.n }}",
        "{{ params.cols }}",
        "{{ params.limit }}",
        "{{ params.rates }}",
        "{{ ti.xcom_pull('a') }}",
    ]
    expected = [5, ["a", "b"], None, {"eta": 0.1}, {**SPEC, "n_estimators": 7}]
    assert rendered(train_func="/train.py", op_args=values).op_args == expected
    mapped = BaseOperator.render_template  # the control: Airflow's own rendering evaluates texts
    assert mapped(rendered(spec=SPEC), "1_000", CONTEXT) == 1000


def test_an_operator_may_render_texts_in_such_a_dag():
    task = rendered(train_func="/train.py", op_args=["{{ params.n }}"], render_template_as_native_obj=False)
    assert task.op_args == ["5"]


@pytest.mark.parametrize("native", [True, False])
def test_the_fields_of_a_spec_have_their_types(native):
    fields = {
        **SPEC,
        "n_estimators": "{{ params.n }}",
        "input_cols": "{{ params.cols }}",
        "params": {"eta": "{{ params.rates.eta }}"},
        "run_config": {"env": {"FLAG": "1"}},
        "tracking": {"run_name": "{{ ds_nodash }}", "tags": {"version": "1.0", "list": "[1, 2]"}},
        "dataset": {"paths": "['/data/{{ ds_nodash }}']", "filters": [["code", "=", "{{ ds_nodash }}"]]},
    }
    spec = spec_of(rendered(native, spec=fields).spec)
    assert (spec.n_estimators, spec.input_cols, spec.dataset.paths) == (5, ("a", "b"), ("/data/20260101",))
    assert float(spec.params["eta"]) == 0.1
    assert spec.run_config.env == {"FLAG": "1"}
    assert spec.tracking.tags == {"version": "1.0", "list": "[1, 2]"}
    assert spec.tracking.run_name == spec.dataset.filters[0][0][2] == "20260101"


@pytest.mark.parametrize("native", [True, False])
def test_a_table_is_read_as_of_the_end_of_the_interval(native):
    dataset = {"format": "delta", "paths": ["/lake/flights"], "as_of": "{{ data_interval_end }}"}
    found = spec_of(rendered(native, spec={**SPEC, "dataset": dataset}).spec).dataset
    assert parse_moment(found.as_of) == datetime(2026, 1, 2, tzinfo=UTC)


def test_a_prediction_has_its_types():
    given = {"model": "models:/m/1", "dataset": {"paths": "['/{{ 'x' }}']"}, "output_path": "/out/{{ ds_nodash }}"}
    spec = rendered(operator=BatchPredictOperator, spec={"keep_cols": "{{ params.cols }}"}, **given).job_spec(CONTEXT)
    assert (spec.dataset.paths, spec.output_path, spec.keep_cols) == (("/x",), "/out/20260101", ("a", "b"))


def test_a_text_for_a_spec_is_refused_with_a_hint():
    with pytest.raises(InvalidArgumentError, match=r"spec=prepare\(\)"):
        spec_of(rendered(False, spec="{{ ti.xcom_pull('a') }}").spec)


IN_RUN = {
    "ds": "2026-01-01",
    "logical_date": pendulum.datetime(2026, 1, 1, 9, tz="Asia/Tokyo"),
    "params": {"rate": 0.1, "since": pendulum.datetime(2026, 1, 1)},
    "ti": object(),
    "dag_run": object(),
}
EXPECTED = {
    "ds": "2026-01-01",
    "logical_date": datetime(2026, 1, 1, tzinfo=UTC),
    "params": {"rate": 0.1, "since": datetime(2026, 1, 1, tzinfo=UTC)},
}


def test_a_function_gets_plain_values_of_the_context():
    named = lambda x, ds, params, logical_date=None, data_interval_end=None: None  # noqa: E731
    found = context_values(named, IN_RUN)
    assert found == {**EXPECTED, "data_interval_end": None}
    assert context_values(lambda x, **context: None, IN_RUN) == EXPECTED
    types = [found["logical_date"], found["logical_date"].tzinfo, found["params"], found["params"]["since"]]
    assert not [each for each in types if type(each).__module__ not in (*sys.stdlib_module_names, "builtins")]


@pytest.mark.parametrize("name", ["ti", "var", "dag_run", "task_instance"])
def test_an_object_of_the_task_is_refused_as_a_parameter(name):
    def of(call):
        scope = {}
        exec(f"def train(rate, {name}=None): return rate", scope)
        with DAG("a_dag", schedule=None):
            call(distributed_task(pool_name="p")(scope["train"]))

    with pytest.raises(InvalidArgumentError, match=f"task train: train runs on the pool, where {name} of Airflow's"):
        of(lambda train: train(0.1))
    of(lambda train: train(0.1, **{name: "mine"}))


def test_an_instance_of_a_mapped_task_is_named_by_what_its_job_is_about(monkeypatch):
    register = {"model": "delays-{{ ds_nodash }}", "metric": "rmse", "holdout": {"paths": ["/h"]}}
    specs = [{**SPEC, "register": register}, "{{ no spec }}"]
    with DAG("a_dag", schedule=None, render_template_as_native_obj=True) as dag:
        mapped = DistributedTrainOperator.partial(task_id="t", pool_name="p").expand(spec=specs)
        results = [{"model_name": "delays-UA", "model_version": "3"}]
        promoted = PromoteModelOperator.partial(task_id="p").expand(training=results)
    tasks = [mapped.unmap({"spec": spec}) for spec in specs] + [promoted.unmap({"training": results[0]})]
    for index, expected in enumerate(["0 delays-20260101", "t", "2 delays-UA"]):
        task = tasks[index]
        if index == 0:
            task.render_template_fields(CONTEXT)
        context = {**CONTEXT, "task": task, "ti": type("Ti", (), {"map_index": index})()}
        monkeypatch.setattr("shoal.airflow.operators.base.get_current_context", lambda context=context: context)
        assert dag.get_template_env().from_string(task.map_index_template).render(context) == expected


def test_the_link_to_the_job_is_there_while_the_task_runs(monkeypatch):
    sent = []
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", type("Comms", (), {"send": sent.append})(), raising=False)
    ti = type("Ti", (), {"dag_id": "d", "task_id": "t", "run_id": "r", "map_index": 2})()
    show_links({"Job": "/shoal/jobs/x"}, ti)
    assert [(one.key, one.value, one.map_index) for one in sent] == [("_link_JobPageLink", "/shoal/jobs/x", 2)]
