"""What Airflow loads in each of its processes: the settings of `[shoal]`, and the listener to failed runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from airflow.listeners.spec import dagrun
from airflow.models.dag import DagModel
from airflow.plugins_manager import AirflowPlugin
from airflow.sdk._shared.listeners.spec import lifecycle
from airflow.sdk.configuration import conf
from airflow.sdk.listener import ListenerManager, taskinstance

from shoal import history
from shoal.airflow.deployment import VARIABLES, apply_settings, config_section
from shoal.errors import StoreError
from shoal.jobs.cleanup import end_in_store
from shoal.jobs.journal import attempts
from shoal.pool.journal import commands, rows
from shoal.pool.journal.advance import advance
from shoal.pool.spec import LeaseOptions
from shoal.state import Store
from shoal.state.schema import Job, JobState, Lease
from tests.airflow.conftest import RUN
from tests.support.job_store import POOL
from tests.support.waiting import wait_until


@pytest.fixture
def plugin() -> type[AirflowPlugin]:
    (found,) = (one for one in entry_points(group="airflow.plugins") if one.name == "shoal_listeners")
    return found.load()


@pytest.fixture
def hook(plugin):
    """Airflow's side: it calls the listeners of the plugin."""
    manager = ListenerManager()
    manager.add_hookspecs(lifecycle)
    manager.add_hookspecs(dagrun)
    manager.add_hookspecs(taskinstance)
    for listener in plugin.listeners:
        manager.add_listener(listener)
    manager.pm.check_pending()
    return manager.hook


def add_job(store: Store, name: str, holder: str, task: str = "train/-1") -> None:
    with store.transaction() as session:
        session.add(
            Job(
                id=name, attempt=1, pool=POOL, holder=holder, spec={}, state=JobState.RUNNING, endpoint={},
                last_polled_at=0.0, created_at=0.0, task_key=task,
            )
        )  # fmt: skip


def add_lease(store: Store, holder: str) -> None:
    with store.transaction() as session:
        commands.lease(
            session, POOL, 1, exclusive=False, holder=holder, ttl=900.0, options=LeaseOptions(), now=1e9,
        )  # fmt: skip


def states(store: Store) -> dict[str, str]:
    return {job.id: job.state.value for job in attempts.newest(store, pool=None, states=(), limit=9)}


def leases_after_a_round(store: Store) -> set[str]:
    with store.transaction() as session:
        advance(session, rows.load(session, POOL), now=1e9)
        return {lease.holder for lease in session.query(Lease)}


def recorded() -> None:
    wait_until(lambda: all(one.name != "shoal-failed-run" for one in threading.enumerate()), "the listener's thread")


def test_a_failed_run_ends_its_jobs_and_leases_and_no_others(store, hook):
    held = {
        "of_the_run": RUN,
        "of_a_block": f"{RUN}#score_lease_pool",
        "of_an_older_shoal": "airflow:a_dag/a_run",
        "other": f"{RUN}_2",
        "of_another_airflow": "airflow:others:a_dag/a_run",
    }
    for name, holder in held.items():
        add_job(store, name, holder)
        add_lease(store, holder)

    hook.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="a_dag", run_id="a_run"), msg="timed_out")
    recorded()

    ended = {"of_the_run", "of_a_block", "of_an_older_shoal"}
    assert states(store) == {name: "cancelled" if name in ended else "running" for name in held}
    assert attempts.latest(store, "of_the_run").error == "its DAG run failed: timed_out"
    hook.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="a_dag", run_id="a_run"), msg="failed again")
    recorded()
    assert {line.subject for line in history.read(kind="released")} == {held[name] for name in ended}
    assert leases_after_a_round(store) == {held[name] for name in held.keys() - ended}


FAILED_RUN_AT_THE_END = """
import atexit
from types import SimpleNamespace
import shoal.jobs.cleanup
from shoal.airflow import listeners

listeners.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="a_dag", run_id="a_run"), msg="timed_out")
atexit.register(print, "the exit handlers run", flush=True)
"""


@pytest.mark.processes
def test_a_run_that_fails_at_the_end_of_the_process_is_recorded(store):
    add_job(store, "of_the_run", RUN)
    with store.transaction():  # the listener has to wait, and Airflow's exit handler closes all sessions meanwhile
        process = subprocess.Popen([sys.executable, "-c", FAILED_RUN_AT_THE_END], stdout=subprocess.PIPE, text=True)
        while "the exit handlers run" not in (line := process.stdout.readline()):
            assert line, "the process has ended early"

    process.communicate(timeout=60)
    assert (process.returncode, states(store)) == (0, {"of_the_run": "cancelled"})


def killed(task_id: str, **attributes) -> SimpleNamespace:
    """A task as it is in Airflow's database after the scheduler has found that its process died."""
    return SimpleNamespace(
        **{
            "dag_id": "a_dag", "run_id": "a_run", "task_id": task_id, "map_index": -1, "state": "failed",
            "_sa_instance_state": None, **attributes,
        }
    )  # fmt: skip


def test_a_task_whose_process_died_ends_its_own_job_and_its_own_lease(store, hook):
    add_job(store, "its", RUN)
    add_job(store, "of_another_task", RUN, "train_2/-1")
    for lease in (RUN, f"{RUN}#score_lease_pool"):
        add_lease(store, lease)

    hook.on_task_instance_failed(previous_state="running", task_instance=killed("train"), error="the worker was lost")
    hook.on_task_instance_failed(previous_state="running", task_instance=killed("score_lease_pool"), error="lost")
    recorded()

    assert states(store) == {"its": "cancelled", "of_another_task": "running"}
    assert leases_after_a_round(store) == {RUN}


@pytest.fixture
def fraud(fresh_home, monkeypatch) -> Store:
    """The store of the team "fraud", in an Airflow in which the DAG "a_dag" belongs to this team."""
    url = f"sqlite:///{fresh_home / 'fraud.db'}"
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
    monkeypatch.setenv("AIRFLOW__FRAUD___SHOAL__STATE_URL", url)
    monkeypatch.setattr(DagModel, "get_team_name", {"a_dag": "fraud"}.get)
    return Store(url)


def test_a_failed_run_is_recorded_in_the_store_of_its_team(store, fraud, hook):
    of_no_team = "airflow:tests:b_dag/a_run"
    for each in (store, fraud):
        add_job(each, "of_the_run", RUN)
        add_job(each, "of_no_team", of_no_team)

    hook.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="a_dag", run_id="a_run"), msg="timed_out")
    recorded()
    assert states(store) == {"of_the_run": "running", "of_no_team": "running"}
    assert states(fraud) == {"of_the_run": "cancelled", "of_no_team": "running"}

    hook.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="b_dag", run_id="a_run"), msg="timed_out")
    recorded()
    assert states(store) == {"of_the_run": "running", "of_no_team": "cancelled"}
    assert states(fraud) == {"of_the_run": "cancelled", "of_no_team": "running"}


def test_a_store_that_is_away_is_reported_once_in_one_line(store, hook, monkeypatch, caplog):
    for outcome in (StoreError("away\nbehind a line break"), None, StoreError("away again")):
        monkeypatch.setattr("shoal.jobs.cleanup.end_in_store", Mock(side_effect=outcome, return_value=()))
        for _ in range(3):
            hook.on_dag_run_failed(dag_run=SimpleNamespace(dag_id="a_dag", run_id="a_run"), msg="timed_out")
            recorded()
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["StoreError: away behind" in told[0].message, "StoreError: away again" in told[1].message] == [True, True]
    assert len(told) == 2 and not any(record.exc_info or "\n" in record.message for record in told)


@pytest.mark.parametrize("team", ["fraud", "ads", None])
def test_a_task_uses_the_store_of_its_team(fraud, hook, monkeypatch, team):
    own = "sqlite:////var/lib/own.db"
    monkeypatch.setenv("SHOAL_STATE_URL", own)
    context = {"dag_run": SimpleNamespace(team_name=team)}
    task = SimpleNamespace(get_template_context=lambda: context)

    hook.on_task_instance_running(previous_state="queued", task_instance=task)

    assert os.environ["SHOAL_STATE_URL"] == (fraud.url if team == "fraud" else own)


@pytest.mark.parametrize(
    ("previous", "task"),
    [
        ("running", killed("train", state="up_for_retry")),  # the next try attaches to the job
        (None, killed("train")),  # marked by a user: the operator's cancel_on_kill decides
        ("running", SimpleNamespace(task_id="train", state="failed")),  # in the process of the task
    ],
)
def test_jobs_that_a_task_still_decides_about_are_left_to_it(store, hook, previous, task):
    add_job(store, "its", RUN)

    hook.on_task_instance_failed(previous_state=previous, task_instance=task, error=None)
    recorded()

    assert states(store) == {"its": "running"}


def test_without_a_store_no_store_is_created(empty_home):
    def ended():
        return end_in_store(reason="x", owns_lease=lambda holder: True, owns_job=lambda holder, key: True)

    assert ended() == []
    assert not (empty_home / "state.db").exists()
    (empty_home / "state.db").touch(mode=0o600)  # a database without tables, such as a new one of PostgreSQL
    assert ended() == []
    assert not Store(migrate=False).has_tables()


@pytest.fixture
def unset(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "")  # so that the test's end removes what the settings have set
        monkeypatch.delenv(variable)


def test_an_option_sets_its_variable_unless_it_is_set(unset, monkeypatch, plugin, caplog):
    monkeypatch.setenv("SHOAL_HOME", "/from/the/environment")
    for option in VARIABLES:
        monkeypatch.setenv(f"AIRFLOW__SHOAL__{option.upper()}", f"/of/{option}")

    plugin.on_load()
    apply_settings()  # in a child process

    assert {name: os.environ[name] for name in VARIABLES.values()} == {
        "SHOAL_HOME": "/from/the/environment",
        "SHOAL_STATE_URL": "/of/state_url",
        "SHOAL_POOL": "/of/pool",
        "SHOAL_POOL_URIS": "/of/pool_uris",
        "SHOAL_UI_URL": "/of/ui_url",
    }
    assert {record.getMessage() for record in caplog.records if record.name == "shoal.airflow.deployment"} == {
        "the option home in section [shoal] of Airflow's configuration is ignored, because the environment variable "
        "SHOAL_HOME has another value: remove one of them"
    }


def test_options_that_have_no_value_set_nothing(unset):
    apply_settings()

    assert not os.environ.keys() & set(VARIABLES.values())


def test_airflow_knows_the_options_and_which_one_is_a_secret():
    assert config_section()["shoal"]["options"].keys() == VARIABLES.keys() | {"deployment"}
    assert [key for section, key in conf.sensitive_config_values if section == "shoal"] == ["state_url"]
