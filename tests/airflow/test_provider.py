"""What Airflow is told of shoal, by the entry point, and what it makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.resources import files

import jsonschema
import pytest

HEAVY = ("ray", "torch", "xgboost", "lightgbm", "pandas", "pyarrow", "mlflow", "sklearn")
NOT_FOR_CHECKS = ("shoal.jobs.submission", "shoal.jobs.handle", "shoal.jobs.mlflow")
"""Modules that a DAG file does not need, though its specs are checked."""


@pytest.fixture
def info():
    (found,) = (one for one in entry_points(group="apache_airflow_provider") if one.dist.name == "shoal")
    return found.load()()


def test_the_info_is_what_airflow_takes(info):
    jsonschema.validate(info, json.loads((files("airflow") / "provider_info.schema.json").read_text()))


def test_the_modules_that_it_names_are_there(info):
    named = [
        module for what in ("operators", "sensors", "hooks") for one in info[what] for module in one["python-modules"]
    ]
    for module in named:
        __import__(module)


def test_the_decorator_is_there():
    from airflow.sdk import task

    from shoal.airflow.decorators import distributed_task

    assert task.distributed is distributed_task


def test_the_form_has_every_option_of_a_pool(info):
    from shoal.airflow.hooks import ComputePoolHook
    from shoal.pool.spec import PoolSpec

    (connection,) = info["connection-types"]
    fields = connection["conn-fields"]
    assert {"name", *fields} == set(PoolSpec.model_fields)
    assert fields["backend"]["schema"]["enum"] == ["local", "ray", None]
    assert fields["max_nodes"]["label"] == "Max nodes"
    assert connection["connection-type"] == ComputePoolHook.conn_type
    assert (
        connection["ui-field-behaviour"]["hidden-fields"] == ComputePoolHook.get_ui_field_behaviour()["hidden_fields"]
    )


@pytest.mark.processes
def test_operators_add_nothing_heavy_to_airflow():
    check = (
        "import sys, airflow.sdk; from airflow.providers.standard.operators import python; before = set(sys.modules);"
        "import shoal.airflow.operators, shoal.airflow.sensors, shoal.airflow.hooks, shoal.airflow.context;"
        "from airflow.sdk import task; task.distributed(num_workers=2)(lambda: 1);"
        "spec = {'dataset': {'paths': ['/x']}, 'input_cols': ['x'], 'label_col': 'y'};"
        "shoal.airflow.operators.DistributedTrainOperator(task_id='train', spec=spec);"
        f"print([name for name in {(*HEAVY, *NOT_FOR_CHECKS)} if name in set(sys.modules) - before])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
