"""What Airflow is told of shoal, by the entry point, and what it makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import entry_points
from importlib.resources import files

import jsonschema
import pytest
from airflow.sdk import DAG, task

from shoal.airflow import operators
from shoal.airflow.sensors import NodesSensor

HEAVY = ("ray", "torch", "xgboost", "lightgbm", "pandas", "pyarrow", "mlflow", "sklearn")
NOT_FOR_CHECKS = (
    "shoal.jobs.submission",
    "shoal.jobs.handle",
    "shoal.jobs.mlflow_run",
    "shoal.models.registry",
    "shoal.models.gate",
)
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


RENDERERS = {"bash", "html", "json", "md", "py", "sql", "yaml"}
"""Formats that Airflow highlights (its guide to custom operators lists more)."""


@pytest.mark.parametrize(
    "made",
    [
        lambda: operators.ScaleClusterOperator(task_id="t", expected_cluster_size=2),
        lambda: operators.LeasePoolOperator(task_id="t", size=2),
        lambda: operators.DistributedTrainOperator(task_id="t", spec="{{ params.spec }}"),
        lambda: operators.BatchPredictOperator(task_id="t", model="models:/m/1", dataset="{{ x }}", output_path="/out"),
        lambda: operators.TuneOperator(task_id="t", train="{{ x }}", space={"eta": [0.1, 0.3]}),
        lambda: operators.CleanupPoolOperator(task_id="t"),
        lambda: operators.SweepPoolsOperator(task_id="t"),
        lambda: operators.CheckModelsOperator(task_id="t", started_within=timedelta(hours=1)),
        lambda: NodesSensor(task_id="t", expected_nodes=2),
        lambda: task.distributed(task_id="t")(lambda: 1)().operator,
        lambda: task.ray_launch(task_id="t")(lambda: 1)().operator,
    ],
)
def test_template_fields_are_attributes_and_airflow_can_highlight_them(made):
    with DAG("a_dag", schedule=None):
        operator = made()

    assert all(hasattr(operator, field) for field in operator.template_fields)
    assert operator.template_fields_renderers.keys() <= set(operator.template_fields)
    assert set(operator.template_fields_renderers.values()) <= RENDERERS
    structured = {"options", "plan_for", "spec", "dataset", "train", "space", "op_args", "op_kwargs"}
    assert structured & set(operator.template_fields) == operator.template_fields_renderers.keys()


def test_the_decorators_are_there():
    from shoal.airflow.task_decorators import distributed_task, ray_launch_task

    assert (task.distributed, task.ray_launch) == (distributed_task, ray_launch_task)


def test_the_form_has_every_option_of_a_pool(info):
    from shoal.airflow.hooks import ComputePoolHook
    from shoal.pool.spec import PoolSpec

    (connection,) = info["connection-types"]
    fields = connection["conn-fields"]
    assert {"name", *fields} == set(PoolSpec.model_fields)
    assert fields["backend"]["schema"]["enum"] == ["local", "ray", "kuberay", None]
    assert fields["max_nodes"]["label"] == "Max nodes"
    assert connection["connection-type"] == ComputePoolHook.conn_type


ORCHESTRATOR = """
import sys
import airflow.sdk
from airflow.providers.standard.operators import python

# Python raises ModuleNotFoundError for these, as where they are not installed.
sys.modules.update(dict.fromkeys(ABSENT))
from airflow.sdk import DAG, task
from airflow.serialization.serialized_objects import DagSerialization
from shoal.airflow import notifications, results
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.hooks import ComputePoolHook
from shoal.airflow.operators import BatchPredictOperator, DistributedTrainOperator
from shoal.airflow.sensors import NodesSensor
from shoal.data import DataConnector
from shoal.errors import MissingExtraError

rows = DataConnector.from_parquet("/data/x.parquet")
job = {"dataset": rows, "input_cols": ["x"], "label_col": "y", "params": {"eta": 0.1}}
with DAG("a_dag", schedule=None) as dag, pool_for_run(size=2, pool_name="local://p"):
    NodesSensor(task_id="nodes", expected_nodes=2, pool_name="p")
    DistributedTrainOperator(task_id="train", spec=job, pool_name="p")
    BatchPredictOperator(task_id="predict", model="models:/m/1", dataset=rows, output_path="/out", pool_name="p")
    task.distributed(task_id="rank", num_workers=2, pool_name="p")(lambda: 1)()
DagSerialization.from_dict(DagSerialization.to_dict(dag))
print("not for checks:", [name for name in NOT_FOR_CHECKS if name in sys.modules])

import shoal.jobs.submission
from shoal.cli import app
from shoal.pool.api import list_pools
print("pools:", list_pools())
for command in (["jobs", "list"], ["sweep"], ["check-dags", "--help"]):
    try:
        app(command)
    except SystemExit as ended:
        print(command[0], ended.code)
for read in (rows.to_arrow, rows.digest, lambda: DataConnector.from_sql("SELECT 1", "sqlite://")):
    try:
        read()
    except MissingExtraError as error:
        print(error)
"""


@pytest.mark.processes
def test_an_orchestrator_needs_no_data_libraries(fresh_home):
    """Operators, sensors, hooks, the command line and the store work without them, and say what is missing."""
    absent = (*HEAVY, "numpy", "scipy")
    code = f"ABSENT, NOT_FOR_CHECKS = {absent}, {NOT_FOR_CHECKS}\n{ORCHESTRATOR}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert {"not for checks: []", "pools: []", "jobs 0", "sweep 0", "check-dags 0"} <= set(said)
    missing = 'pyarrow is not installed in this environment: install it with `pip install "shoal[data]"`'
    assert said.count(missing) == 3
