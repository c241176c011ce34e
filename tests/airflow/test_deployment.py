"""The id of an Airflow deployment, by which two Airflows with one store know their own leases and jobs."""

from __future__ import annotations

import time

import pytest
from airflow.sdk import Variable
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import ErrorResponse

from shoal import jobs
from shoal.airflow import deployment
from shoal.airflow.deployment import VARIABLE, deployment_of_task, holder_of, other_addresses
from shoal.airflow.operators import CleanupPoolOperator, DistributedTrainOperator
from shoal.airflow.operators.base import PoolOperator
from shoal.errors import InvalidArgumentError
from shoal.jobs import JobResult, load_results
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.pool.holder import DagRunHolder
from shoal.state import Store, deployments
from shoal.state.schema import JobState
from tests.airflow.conftest import RUN
from tests.airflow.test_listeners import add_job, add_lease


@pytest.mark.parametrize(
    ("holder", "run"),
    [
        ("airflow:prod:dag/run", ("prod", "dag", "run")),
        ("airflow:prod:dag/a/b:c+00:00#score_lease_pool", ("prod", "dag", "a/b:c+00:00")),
        ("airflow:dag/scheduled__2024-01-01T00:00:00+00:00", (None, "dag", "scheduled__2024-01-01T00:00:00+00:00")),
    ],
)
def test_the_name_of_a_run_is_read_as_it_was_written(holder, run):
    assert DagRunHolder.of(holder) == DagRunHolder(*run)
    assert DagRunHolder.of(holder).name == holder.partition("#")[0]


@pytest.mark.parametrize("holder", ["airflow:by_hand", "airflow:prod:by_hand", "prefect:a/b", "job:airflow:a/b"])
def test_other_holders_are_no_runs(holder):
    assert DagRunHolder.of(holder) is None


def test_a_run_that_an_older_shoal_began_keeps_its_name_until_it_has_ended(store, context):
    old = "airflow:a_dag/a_run"
    assert holder_of(context) == RUN
    add_job(store, "job", old)
    add_lease(store, f"{old}#score_lease_pool")

    assert holder_of(context) == old
    assert holder_of(context, "score_lease_pool") == f"{old}#score_lease_pool"
    assert holder_of(context, "other_lease_pool") == f"{RUN}#other_lease_pool"
    attempts.end(store, Key("job", 1), JobState.FAILED, 2.0, error="over")
    assert holder_of(context) == RUN


class ApiServer:
    """Airflow's Variables, as a task sees them; `error` is the answer if there is no Variable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, str] = {}
        self.error = ErrorType.VARIABLE_NOT_FOUND
        self.reads = 0
        deployment._of_variable.cache_clear()
        monkeypatch.setenv("AIRFLOW__SHOAL__DEPLOYMENT", " ")
        monkeypatch.setattr(Variable, "get", self.get)
        monkeypatch.setattr(Variable, "set", lambda key, value, description: self.values.update({key: value}))
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", self, raising=False)

    def get(self, key: str, default: str | None) -> str | None:
        self.reads += 1
        return self.values.get(key, default)

    def send(self, message: object) -> ErrorResponse:
        return ErrorResponse(error=self.error)


@pytest.fixture
def api(monkeypatch, fresh_home) -> ApiServer:
    return ApiServer(monkeypatch)


def test_a_task_makes_the_id_where_no_scheduler_has_made_it(api):
    first = deployment_of_task()
    assert api.values == {VARIABLE: first}
    deployment._of_variable.cache_clear()  # as in the next task
    before = api.reads
    assert [deployment_of_task() for _ in range(3)] == [first] * 3
    assert api.reads == before + 1


def test_a_task_makes_no_id_while_airflow_cannot_say_whether_there_is_one(api):
    api.error = ErrorType.API_SERVER_ERROR
    with pytest.raises(AirflowRuntimeError):
        deployment_of_task()
    assert api.values == {}


def test_no_task_of_a_team_makes_the_id(api, monkeypatch):
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    with pytest.raises(InvalidArgumentError, match=r'this Airflow has no id: set "deployment" in section \[shoal\]'):
        deployment_of_task()
    assert api.values == {}


def test_an_id_that_would_make_names_ambiguous_is_refused(monkeypatch):
    monkeypatch.setenv("AIRFLOW__SHOAL__DEPLOYMENT", "prod:eu")
    with pytest.raises(InvalidArgumentError, match="prod:eu"):
        deployment_of_task()


def test_a_copy_of_an_airflow_is_found_by_its_address(fresh_home, monkeypatch):
    assert other_addresses("tests") == []  # without an address, nothing is recorded
    store, copy = Store(), "https://copy.example"
    assert deployments.base_urls(store) == {}
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/")
    assert other_addresses("tests") == []
    assert other_addresses("tests") == []
    assert deployments.record(store, "tests", copy, 1.0) == ["https://airflow.example"]
    assert other_addresses("tests") == []  # the copy was seen in 1970
    deployments.record(store, "tests", copy, time.time() - 49 * 3600)
    assert other_addresses("tests") == []  # and last 49 hours ago, as the address of an Airflow that has moved
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", copy)
    assert other_addresses("tests") == ["https://airflow.example"]
    assert deployments.base_urls(store) == {"tests": copy}


@pytest.mark.ray
def test_two_airflows_with_one_store_train_their_own_models(pool, context, monkeypatch, tmp_path):
    """Both have a DAG run with the same ids; one trains while the other one cleans up after its run."""
    permission = tmp_path / "permission"

    def execute(operator: type[PoolOperator], who: str, **arguments: object) -> dict:
        monkeypatch.setenv("AIRFLOW__SHOAL__DEPLOYMENT", who)
        return operator(task_id="train", pool_name=pool.name, **arguments).execute(context)

    def train(who: str, **arguments: object) -> dict:
        def model(who: str, wanted: str) -> str:
            import pathlib
            import time

            while who == "staging" and not pathlib.Path(wanted).exists():
                time.sleep(0.1)
            return f"model of {who}"

        spec = {"tracking": None}
        given = {"spec": spec, "train_func": model, "op_args": [who, str(permission)], **arguments}
        return execute(DistributedTrainOperator, who, **given)

    staging = train("staging", wait_for_completion=False)
    production = train("production", wait_for_completion=False)
    assert staging["job_id"] != production["job_id"]
    assert load_results(jobs.attach(production["job_id"]).wait()).results == ("model of production",)
    assert execute(CleanupPoolOperator, "production")["cancelled"] == ()
    permission.touch()
    context["ti"].try_number = 2
    again = train("staging")
    assert again["job_id"] == staging["job_id"]
    assert load_results(JobResult.model_validate(again)).results == ("model of staging",)
