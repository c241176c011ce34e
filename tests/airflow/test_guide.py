"""The DAGs of the guides of Airflow do what the guides say: a few lines that lease, train and give back."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pandas as pd
import pendulum
import pytest
from airflow.sdk import Asset

from shoal.data import DataConnector
from shoal.data.checks import validate_columns
from shoal.jobs import JobSpec
from tests.support import reference
from tests.support.guides import ROOT, examples

README = ROOT / "README.md"


def dag_of_the_guide(name: str, function: str):
    (code,) = (code for key, code in examples().items() if key.endswith(f":{name}"))
    scope: dict = {"__name__": "delays", "__file__": "/home/reader/dags/delays.py"}
    exec(re.sub(rf"^(\w+ = )?{function}\(\)$", f"found = {function}()", code, flags=re.MULTILINE), scope)
    return scope["found"]


def test_the_guides_dag_has_its_setup_and_teardown():
    dag = dag_of_the_guide("airflow-dag", "delays")
    assert dag.get_task("lease_pool").downstream_task_ids == {"train", "clean_up_pool"}
    assert dag.get_task("clean_up_pool").is_teardown
    assert dag.get_task("train").upstream_task_ids == {"lease_pool"}
    assert dag.get_task("train").spec["dataset"]["paths"] == ["/home/reader/flights/2013-01.parquet"]


def test_the_guides_mapped_trainings_run_in_the_lease_and_what_uses_them_runs_after_it():
    dag = dag_of_the_guide("airflow-mapped", "many_delays")
    assert dag.get_task("train").upstream_task_ids == {"lease_pool", "specs"}
    assert dag.get_task("clean_up_pool").upstream_task_ids == {"lease_pool", "train"}
    assert dag.get_task("count").upstream_task_ids == {"train"}


def test_the_guides_deferred_dag_defers_its_lease_sensor_and_training():
    dag = dag_of_the_guide("airflow-deferred", "deferred_delays")
    assert all(dag.get_task(name).deferrable for name in ("lease_pool", "nodes", "train"))
    assert dag.get_task("train").poll_interval == 10


def test_the_guides_scoring_is_scheduled_on_its_model_and_predicts_with_the_version_of_the_event():
    dag = dag_of_the_guide("airflow-scoring", "score_delays")
    assert dag.timetable.asset_condition.objects == (Asset("shoal://models/delays"),)
    predict = dag.get_task("predict")
    predict.render_template_fields({"ti": SimpleNamespace(xcom_pull={"version": "7"}.get)})
    assert (predict.model, predict.output_path) == ("models:/delays/7", "/data/predictions/delays/version-7")


def test_the_guides_messages_are_about_each_model_or_about_the_run():
    one = dag_of_the_guide("airflow-told", "told_delays")
    many = dag_of_the_guide("airflow-told", "told_many_delays")
    assert one.get_task("train").has_on_success_callback and one.get_task("train").has_on_failure_callback
    assert many.has_on_success_callback and many.has_on_failure_callback


def test_the_guides_promotion_comes_after_the_approval_and_the_nodes_are_released_before_it():
    dag = dag_of_the_guide("airflow-approval", "approved_delays")
    assert dag.get_task("clean_up_pool").upstream_task_ids == {"lease_pool", "train"}
    assert dag.get_task("approve").upstream_task_ids == {"train"}
    assert dag.get_task("promote").upstream_task_ids == {"approve", "train"}
    assert dag.get_task("train").spec["register"]["promote"] is False


def test_the_guides_own_table_becomes_a_spec_whose_inputs_can_be_trained_on(tmp_path):
    dag = dag_of_the_guide("airflow-own-table", "retrain_rentals")
    assert dag.get_task("lease_pool").upstream_task_ids == {"prepare"}
    hours = pd.date_range("2026-11-01", "2026-11-20", freq="h")
    humidity = [None, *[50] * (len(hours) - 1)]
    columns = {"temp": 9.5, "humidity": humidity, "weather": "rain", "station": "Nord", "rentals": 7}
    pd.DataFrame({"started": hours, **columns}).to_csv(tmp_path / "rentals.csv")
    prepare = dag.get_task("prepare").python_callable
    prepare.__globals__["DATA"] = tmp_path

    spec = JobSpec.parse(prepare(SimpleNamespace(logical_date=pendulum.datetime(2026, 11, 19))))

    sets = [DataConnector.from_spec(each) for each in (spec.dataset, spec.register_as.holdout)]
    for rows in sets:
        validate_columns(rows.source, spec.input_cols, spec.label_col, categorical_cols=spec.categorical_cols)
    started = [rows.to_pandas()["started"] for rows in sets]
    assert [(each.min(), each.max()) for each in started] == [
        (pd.Timestamp("2026-11-01"), pd.Timestamp("2026-11-11T23:00")),
        (pd.Timestamp("2026-11-12"), pd.Timestamp("2026-11-18T23:00")),
    ]


@pytest.mark.parametrize(("run", "month"), [((2013, 2, 1), "2013-01"), ((2014, 1, 1), "2013-12")])
def test_the_readmes_dag_moves_its_window_with_its_runs(run, month):
    (code,) = re.findall(r"<!-- example: airflow -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    scope: dict = {"__name__": "retrain", "__file__": "/home/reader/dags/retrain.py"}
    exec(code, scope)
    train = scope["monthly"].get_task("train")
    train.render_template_fields({"logical_date": pendulum.datetime(*run)})
    assert train.spec["dataset"]["paths"] == [f"/home/reader/flights/{month}.parquet"]


def test_every_option_of_the_example_configuration_exists():
    from configparser import ConfigParser

    from airflow.configuration import conf

    example = ConfigParser()
    example.read(ROOT / "airflow.cfg.example")
    for section in example.sections():
        for option in example.options(section):
            assert conf.has_option(section, option), f"[{section}] {option}"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="signatures of Python's own classes differ")
@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_has_everything_public(name):
    assert reference.path_of(name).read_text() == reference.PAGES[name](), "run `python -m tests.support.reference`"
