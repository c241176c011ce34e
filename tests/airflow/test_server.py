"""The real DAGs in a real Airflow - scheduler, DAG processor, triggerer, API server, LocalExecutor - on a real pool.

One of them in `make test`, the others in `make soak`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import httpx
import mlflow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.airflow_run import DAG_ID
from examples.local_airflow import LocalAirflow
from shoal import ComputePool, RunConfig, jobs
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig
from shoal.errors import ShoalError
from shoal.examples.flights import months_before, retraining_spec
from shoal.jobs import JobResult, JobStatus
from shoal.jobs.files.storage import default_uri
from shoal.state.schema import JobState
from tests.airflow.real_airflow import (
    POOL,
    airflow_until,
    component,
    ended,
    is_given_back,
    jobs_of,
    kill_all,
    real_airflow,
    write_copy,
)
from tests.benchmarks.process_tree import tree_bytes
from tests.support.plain_training import plain_digest
from tests.support.pool_processes import a_worker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.ray]

ANY, FUNCTION = "any_training", "function_training"
MAPPED, TOLD, SCORING = "mapped_training", "told_training", "score_on_promotion"
MANY, DUE, MODEL = "many_trainings", "due_retraining", "recent-flight-delays"
MODELS = int(os.environ.get("SHOAL_MODELS", "6"))
"""How many models the test of many models trains; `make soak` trains more."""
SENSORS = int(os.environ.get("SHOAL_SENSORS", "12"))
TRAININGS = SENSORS // 4
"""How many deferred tasks of both kinds wait in one triggerer; `make soak` has more."""


@pytest.fixture(scope="module")
def airflow(session_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    folder = folder_of_due_retraining(tmp_path_factory.mktemp("dags"))
    with real_airflow(tmp_path_factory.mktemp("airflow"), [folder]) as airflow:
        yield airflow


def folder_of_due_retraining(folder: Path) -> Path:
    """Write a copy of the sample DAG that has three runs due: the second uses another window than the first, and the
    third, one day later, the same as the second."""
    first, last = (f'datetime.fromisoformat("{month}-02T00:00Z")' for month in months_before(datetime.now(UTC), 2))
    changes = {
        "schedule=MONTHLY": 'schedule=CronTriggerTimetable("0 0 1,2 * *", timezone="UTC")',
        "catchup=False": f"start_date={first}, end_date={last}, catchup=True",
        "max_active_runs=2": "max_active_runs=1",
        "import timedelta": "import datetime, timedelta",
        "Param(100": "Param(4",
    }
    write_copy(folder, DUE, changes)
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)  # 127 s here on 2 CPUs, beside the other half of the tests
def test_two_months_at_once_train_evaluate_and_give_the_pool_back(airflow: LocalAirflow):
    runs = {month: airflow.trigger(DAG_ID, {"month": month, "rounds": 5}) for month in (2, 3)}

    assert {month: ended(airflow, DAG_ID, run) for month, run in runs.items()} == {2: "success", 3: "success"}

    results = {month: airflow.returned(DAG_ID, run, "train") for month, run in runs.items()}
    assert abs(int(results[2]["model_version"]) - int(results[3]["model_version"])) == 1
    assert results[2]["rows"] < results[3]["rows"]
    assert results[2]["metrics"] != results[3]["metrics"]
    for month, run in runs.items():
        states = airflow.task_states(DAG_ID, run)
        won, lost = ("promoted", "kept") if results[month]["promoted"] else ("kept", "promoted")
        assert (states[won], states[lost]) == ("success", "skipped")
        log = airflow.task_log(DAG_ID, run, "train", results[month]["attempt"])
        assert any("MLflow run:" in line for line in log), log
    wait_until(is_given_back, "the pool as it was")
    assert results[2]["model_digest"] == plain_digest(ComputePool(POOL), month=2, rounds=5)
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_backfill_gives_a_version_a_month_and_the_better_model_is_the_champion(airflow: LocalAirflow):
    # The last three that are due: after a backfill of older ones, Airflow would also start the last run that is due.
    now = datetime.now(UTC)
    due = [*months_before(now, 2), f"{now:%Y-%m}"]
    months = {"from_date": f"{due[0]}-01T00:00:00Z", "to_date": f"{due[-1]}-01T00:00:00Z"}
    asked = {"dag_id": DAG_ID, "max_active_runs": 1, "dag_run_conf": {"rounds": 5, "month": None}, **months}

    def created() -> int | None:
        """Airflow on SQLite refuses a backfill (503, "Database is locked") while its scheduler writes."""
        try:
            return airflow.call("POST", "/backfills", **asked)["id"]
        except ShoalError as error:
            if "Database is locked" not in str(error):
                raise
            return None

    # While it is paused, which a new DAG is: on SQLite a scheduler that takes up runs that are just being made crashes.
    airflow.wait_for_dag(DAG_ID)
    backfill = airflow_until(created, "Airflow to take the backfill", 120)
    airflow.unpause(DAG_ID)
    airflow_until(lambda: airflow.call("GET", f"/backfills/{backfill}")["completed_at"], "the backfill's end", 600)

    runs = airflow.call("GET", f"/dags/{DAG_ID}/dagRuns?run_type=backfill&order_by=logical_date")["dag_runs"]
    assert [(run["logical_date"][:7], run["state"]) for run in runs] == [(month, "success") for month in due]
    results = [airflow.returned(DAG_ID, run["dag_run_id"], "train") for run in runs]
    versions = [int(result["model_version"]) for result in results]
    assert versions == list(range(versions[0], versions[0] + 3))
    assert len({result["rows"] for result in results}) == 3  # a window of its own each
    for result in results:
        champion = result["champion"]  # there was none before the first, where nothing ran before
        assert result["promoted"] is (champion is None or result["metrics"]["holdout-rmse"] < champion["value"])
    for before, after in pairwise(results):
        champion = before["model_version"] if before["promoted"] else before["champion"]["version"]
        assert after["champion"]["version"] == champion
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_scheduled_runs_move_the_window_and_the_third_has_nothing_new_and_is_skipped(airflow: LocalAirflow):
    before, last = (f"{month}-02" for month in months_before(datetime.now(UTC), 2))
    airflow.unpause(DUE)

    def runs() -> list[dict]:
        return airflow.call("GET", f"/dags/{DUE}/dagRuns?order_by=logical_date")["dag_runs"]

    airflow_until(
        lambda: sum(run["state"] in ("success", "failed") for run in runs()) == 3, "three scheduled runs", 800
    )

    assert [(run["run_type"], run["state"]) for run in runs()] == [("scheduled", "success")] * 3
    assert [run["logical_date"][:10] for run in runs()] == [before, f"{last[:-2]}01", last]
    first, second, third = (run["dag_run_id"] for run in runs())
    specs = [airflow.returned(DUE, run, "prepare") for run in (first, second, third)]
    *_, holdout = months_before(datetime.fromisoformat(f"{before}T00:00Z"), 1)
    assert specs[0]["register"]["holdout"]["paths"][0].endswith(f"{holdout}.parquet")
    assert specs[0]["dataset"]["paths"][1:] + specs[0]["register"]["holdout"]["paths"] == specs[1]["dataset"]["paths"]
    assert specs[1] == specs[2]
    results = [airflow.returned(DUE, run, "train") for run in (first, second)]
    assert int(results[1]["model_version"]) == int(results[0]["model_version"]) + 1
    states = airflow.task_states(DUE, third)
    assert states["train"] == states["evaluate"] == states["promoted"] == states["kept"] == "skipped"
    assert states["clean_up_pool"] == "success"
    log = airflow.task_log(DUE, third, "train")
    why = f"rows, holdout and settings are those of {specs[2]['register']['model']} version"
    assert any(f"{why} {results[1]['model_version']}" in line for line in log), log
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_promotion_is_told_and_starts_the_scoring_with_its_version(airflow: LocalAirflow, tmp_path: Path):
    registry = mlflow.MlflowClient(default_uri())
    if any(model.name == MODEL for model in registry.search_registered_models()):
        registry.delete_registered_model_alias(MODEL, "champion")  # so that the next one is promoted
    airflow.unpause(SCORING)
    spec = retraining_spec(2, n_estimators=5).document()

    small = {"x": [float(n) for n in range(100)], "y": [0.0, 1.0] * 50, "store": [1, 2, 3, 4] * 25}
    pq.write_table(pa.table(small), tmp_path / "data.parquet")
    spec["register"]["model"] = MODEL

    run = airflow.trigger(TOLD, {"spec": spec, "folder": str(tmp_path)})

    assert ended(airflow, TOLD, run) == "failed"
    told = told_of(airflow, run)
    result = JobResult.model_validate(airflow.returned(TOLD, run, "train"))
    version, rmse = result.model_version, f"{result.metrics['holdout-rmse']:.6g}"
    assert told["train"].startswith(f"promoted: {MODEL} version {version}, rmse {rmse}\npromoted ")
    assert "1 of 4 partitions have failed: 3: ValueError: no sales of store 3" in told["many_done"]
    failing = ["own", *(f"{kind}_{how}" for kind in KINDS for how in ("failed", "after")), "many_strict"]
    for name in failing:
        assert re.search(
            f"^failed    task {name}: .*(late|disk is full|no sales).*; see its log, http", told["run"], re.M
        ), name
    assert told["run"].startswith(
        f"{TOLD}: failed: tasks own, train_failed, train_after and 7 more; 9 jobs: 1 promoted, "
    )

    shutil.copy(spec["dataset"]["paths"][0], tmp_path / "late_rows.parquet")
    shutil.copy(tmp_path / "data.parquet", tmp_path / "late.parquet")
    for message in (airflow.home / "told").glob(f"*-{run}"):
        message.unlink()
    cleared = {"dag_run_id": run, "task_ids": failing, "include_downstream": True, "only_failed": False}
    airflow.call("POST", f"/dags/{TOLD}/clearTaskInstances", dry_run=False, **cleared)

    assert ended(airflow, TOLD, run) == "success"
    told = told_of(airflow, run)
    assert told["run"].startswith(f"{TOLD}: success; 14 jobs: 1 promoted, ")
    assert "failed" not in told["run"].partition("\n")[0]

    scored = airflow_until(
        lambda: airflow.call("GET", f"/dags/{SCORING}/dagRuns")["dag_runs"], "the run of the event", 60
    )
    assert [(one["run_type"], len(scored)) for one in scored] == [("asset_triggered", 1)]
    assert ended(airflow, SCORING, scored[0]["dag_run_id"]) == "success"
    result = JobResult.model_validate(airflow.returned(SCORING, scored[0]["dag_run_id"], "predict"))
    assert result.output_path is not None and f"version-{version}" in result.output_path
    assert pq.read_table(result.output_path).num_rows == result.rows
    wait_until(is_given_back, "the pool as it was")


KINDS = ("train", "tune", "many", "predict")
OF_SUCCESS = {"success", "promoted", "kept", "trained", "predicted"}


def told_of(airflow: LocalAirflow, run: str) -> dict[str, str]:
    """The messages about a run and its tasks, which contradict no state in Airflow."""

    def messages() -> dict[str, str]:
        return {file.name.partition("-")[0]: file.read_text() for file in (airflow.home / "told").glob(f"[!.]*-{run}")}

    wait_until(lambda: "run" in messages(), "the message of the run", 300)
    told, states = messages(), airflow.task_states(TOLD, run)
    for name, text in told.items():
        state = airflow.run_state(TOLD, run) if name == "run" else states[name]
        first = text.split("\n")[0]
        word = re.split("[:;, ]+", first)[1 if name == "run" else 0]
        assert word == state or (state == "success" and word in OF_SUCCESS), (name, state, text)
    return told


# The first test of the module pays for Airflow's start: 60 s here, and 170 s beside two other loads. With it, 300 s are
# too few: the limit is for setup, call and teardown together.
@pytest.mark.timeout(900)
def test_functions_of_the_dags_file_run_on_every_rank(airflow: LocalAirflow):
    run = airflow.trigger(FUNCTION, {})

    assert ended(airflow, FUNCTION, run) == "success", airflow.task_log(FUNCTION, run, "decorated")

    ranks = [{"rank": rank, "total": 3.0, "dag": FUNCTION, "run": run} for rank in (0, 1)]
    assert airflow.returned(FUNCTION, run, "decorated") == ranks
    assert airflow.returned(FUNCTION, run, "compare") is True
    result = JobResult.model_validate(airflow.returned(FUNCTION, run, "operator"))
    assert jobs.load_results(result).results == (6.0, 6.0)
    deployment = airflow.call("GET", "/variables/shoal_deployment")["value"]
    assert {job.holder for job in jobs_of(FUNCTION, run)} == {f"airflow:{deployment}:{FUNCTION}/{run}"}
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
def test_one_of_five_mapped_trainings_fails_alone_and_is_trained_again_alone(airflow: LocalAirflow, tmp_path: Path):
    data = tmp_path / "data.parquet"
    pq.write_table(pa.table({"x": [float(number) for number in range(100)], "y": [0.0, 1.0] * 50}), data)
    late = tmp_path / "late.parquet"
    fields = {"input_cols": ["x"], "label_col": "y", "tracking": None}
    specs = [
        {**fields, "dataset": {"paths": [str(path)]}, "n_estimators": 2, "scaling_config": {"num_workers": 1}}
        for path in (data, data, late, data, data)
    ]

    run = airflow.trigger(MAPPED, {"specs": specs})

    assert ended(airflow, MAPPED, run) == "success", airflow.task_states(
        MAPPED, run
    )  # the last task takes what there is
    tasks = airflow.call("GET", f"/dags/{MAPPED}/dagRuns/{run}/taskInstances")["task_instances"]
    by_map = {(one["task_id"], one["map_index"]): one for one in tasks}
    states = [by_map["train", index]["state"] for index in range(5)]
    assert states == ["success", "success", "failed", "success", "success"]
    assert airflow.returned(MAPPED, run, "rows") == [100] * 4
    setup, teardown = by_map["many_lease_pool", -1], by_map["many_clean_up_pool", -1]
    assert teardown["state"] == "success"
    for index in range(5):
        one = by_map["train", index]
        assert setup["end_date"] <= one["start_date"] <= one["end_date"] <= teardown["start_date"]
    mine = jobs_of(MAPPED, run)
    assert sorted(job.state.value for job in mine) == ["failed"] + ["succeeded"] * 4
    assert len({job.job_id for job in mine}) == 5
    wait_until(is_given_back, "the pool as it was")

    shutil.copy(data, late)
    (bad,) = (job for job in mine if job.state.value == "failed")
    user = {"username": "admin", "password": airflow.password}
    token = httpx.post(f"{airflow.url}/auth/token", json=user, timeout=60).json()["access_token"]
    headers = {"Authorization": f"Bearer {token}"}
    plan = httpx.get(f"{airflow.url}/shoal/api/train-again/{bad.job_id}/1", headers=headers, timeout=60).json()
    command = [Path(sys.executable).with_name("shoal"), "train-again", MAPPED, run]
    said = subprocess.run(command, env=airflow.environment, capture_output=True, text=True, check=True).stdout
    assert said == "cleared many_clean_up_pool, many_lease_pool, rows, train[2]\n"
    assert plan["body"]["task_ids"] == ["many_clean_up_pool", "many_lease_pool", "rows", ["train", 2]]
    airflow_until(lambda: airflow.run_state(MAPPED, run) != "success", "the run's new start")
    assert ended(airflow, MAPPED, run) == "success"
    assert airflow.returned(MAPPED, run, "rows") == [100] * 5
    assert len(jobs_of(MAPPED, run)) == 6
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
@pytest.mark.timeout(900 + 60 * MODELS)
def test_of_many_models_one_fails_alone_though_a_worker_and_the_scheduler_are_killed(
    airflow: LocalAirflow, tmp_path: Path
):
    kinds = [f"kind {number:02}" for number in range(MODELS)]
    bad = kinds[1]
    for name in ("train", "holdout"):
        rows = [(kind, x) for kind in kinds for x in range(60 if name == "train" else 30)]
        labels = [None if kind == bad else float(x % 10) for kind, x in rows]
        columns = {"kind": [kind for kind, _ in rows], "x": [float(x % 10) for _, x in rows], "y": labels}
        pq.write_table(pa.table(columns), tmp_path / name, row_group_size=60)
    spec = {
        "dataset": {"paths": [str(tmp_path / "train")]},
        "input_cols": ["x"],
        "label_col": "y",
        "n_estimators": 50,
        "scaling_config": {"num_workers": 1},
        "run_config": {"max_restarts": 1},
        "register": {"model": "many", "metric": "rmse", "holdout": {"paths": [str(tmp_path / "holdout")]}},
    }
    sizes: set[int] = set()

    def mine() -> list[JobStatus]:
        return jobs_of(MANY, run)

    def is_over() -> bool:
        status = ComputePool(POOL).describe()
        sizes.add(len(status.active) + len(status.pending) + len(status.leaving))
        return airflow.run_state(MANY, run) in ("success", "failed")

    wait_until(is_given_back, "a pool without the workers of other runs", 300)
    run = airflow.trigger(MANY, {"spec": spec})
    wait_until(a_worker, "a worker", 300, every=0.5).kill()
    half = (MODELS - 1) // 2
    airflow_until(
        lambda: sum(job.result is not None for job in mine()) >= half, "half of the models", 300 + 30 * MODELS
    )
    kill_all(component(airflow, "scheduler"))
    airflow_until(is_over, "the end of the run", 300 + 60 * MODELS)

    assert airflow.run_state(MANY, run) == "success", airflow.task_states(MANY, run)
    lines = airflow.returned(MANY, run, "report")
    assert [line["model"] for line in lines] == [f"many-{kind.replace(' ', '_')}" for kind in kinds]
    # A task that is killed after it took the result of its job, and before Airflow knows, trains once more: "kept".
    assert [line["model"] for line in lines if line["outcome"] not in ("promoted", "kept")] == [lines[1]["model"]]
    assert lines[1]["outcome"] == "failed" and '"y"' in lines[1]["sentence"]
    # A retry attempts the same job again, so a training that fails has one job with several attempts.
    states = {job.job_id: job.state.value for job in sorted(mine(), key=lambda job: job.attempt)}
    assert sorted(states.values()) == ["failed"] + ["succeeded"] * (MODELS - 1)
    assert sum(job.result.restarts for job in mine() if job.result) == 1
    versions = mlflow.MlflowClient(default_uri()).search_model_versions("name LIKE 'many-%'", max_results=1000)
    assert len({version.name for version in versions}) == MODELS - 1
    assert max(sizes) <= 4
    wait_until(is_given_back, "the pool as it was")


@contextmanager
def no_room(folder: Path) -> Iterator[None]:
    """While the block runs, a job has all CPUs of the pool's nodes, and too few nodes are left for the sensors' lease.

    Args:
        folder: Folder of the file that ends the job.
    """
    end = folder / "end"

    def until_the_end() -> None:
        wait_until(end.exists, "the end", 3600)

    pool = ComputePool(POOL, holder="test:no-room")
    with pool.lease(3):
        function = PyTorchDistributor(until_the_end, PyTorchScalingConfig(num_nodes=3), RunConfig(pool_name=pool.name))
        call = function.submit()
        try:
            wait_until(lambda: jobs.attach(call.job_id).status().state is JobState.RUNNING, "the job", 120)
            yield
        finally:
            end.touch()
        call.result()


@pytest.mark.long
@pytest.mark.timeout(900 + 15 * SENSORS)
def test_a_crowd_of_deferred_sensors_and_trainings_comes_back_from_one_triggerer(
    airflow: LocalAirflow, tmp_path: Path, record: Callable[[str, object], None]
):
    data = tmp_path / "data.parquet"
    pq.write_table(pa.table({"x": [float(number) for number in range(100)], "y": [0.0, 1.0] * 50}), data)
    fields = {"dataset": {"paths": [str(data)]}, "input_cols": ["x"], "label_col": "y", "tracking": None}
    spec = {**fields, "n_estimators": 2, "scaling_config": {"num_workers": 1}}
    idle = tree_bytes(component(airflow, "triggerer").pid)

    def states(dag_id: str, run: str, task_id: str) -> Counter[str]:
        path = f"/dags/{dag_id}/dagRuns/{run}/taskInstances?task_id={task_id}&limit=100"  # the most that it gives
        pages = [airflow.call("GET", f"{path}&offset={offset}") for offset in range(0, SENSORS, 100)]
        return Counter(one["state"] for page in pages for one in page["task_instances"])

    def crowd(dag_id: str, task_id: str, size: int, **conf: object) -> str:
        """Trigger a run, and wait until its tasks are deferred: all at once, since the pool has no room for them."""

        def begun() -> str | None:
            with suppress(ShoalError):  # Airflow's SQLite file may be locked while Airflow maps tasks
                return airflow.trigger(dag_id, conf)
            return None

        run = airflow_until(begun, f"Airflow to take {dag_id}", 300)

        def settled() -> Counter[str] | None:
            found = states(dag_id, run, task_id)
            return found if found["deferred"] == size or found["failed"] else None

        assert airflow_until(settled, f"{task_id} deferred", limit) == {"deferred": size}
        return run

    limit = 300 + 5 * SENSORS
    with no_room(tmp_path):
        trainings = crowd("crowd_of_trainings", "train", TRAININGS, specs=[spec] * TRAININGS)
        sensors = crowd("crowd_of_sensors", "nodes", SENSORS, sensors=SENSORS)
        record("deferred at once", TRAININGS + SENSORS)
        above = tree_bytes(component(airflow, "triggerer").pid) - idle
        record("MB of the triggerer above idle", round(above / 1e6))
    began = time.monotonic()

    airflow_until(lambda: airflow.run_state("crowd_of_trainings", trainings) != "running", "the trainings", limit)
    record("s from room to the end of all trainings", round(time.monotonic() - began))
    assert states("crowd_of_trainings", trainings, "train") == {"success": TRAININGS}
    airflow_until(lambda: airflow.run_state("crowd_of_sensors", sensors) != "running", "the sensors", limit)
    record("s from room to the end of all sensors", round(time.monotonic() - began))
    assert states("crowd_of_sensors", sensors, "nodes") == {"success": SENSORS}
    mine = jobs_of("crowd_of_trainings", trainings)
    assert [(job.state, job.attempt) for job in mine] == [(JobState.SUCCEEDED, 1)] * TRAININGS
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
def test_two_networks_are_trained_judged_and_registered(airflow: LocalAirflow):
    run = airflow.trigger("train_networks", {"epochs": 15, "month": 2})

    assert ended(airflow, "train_networks", run) == "success", airflow.task_states("train_networks", run)

    digits, delays = (airflow.returned("train_networks", run, f"train_{name}") for name in ("digits", "delays"))
    assert digits["metrics"]["holdout-accuracy"] > 0.9
    assert delays["metrics"]["holdout-rmse"] < 25
    assert digits["num_workers"] == delays["num_workers"] == 2
    wait_until(is_given_back, "the pool as it was")


@pytest.mark.long
def test_a_broken_training_fails_the_run_and_the_pool_is_given_back(airflow: LocalAirflow):
    broken = retraining_spec(2).model_copy(update={"params": {"objective": "reg:nonsense"}})

    run = airflow.trigger(ANY, {"spec": broken.document()})

    assert ended(airflow, ANY, run) == "failed"
    states = airflow.task_states(ANY, run)
    assert (states["train"], states["clean_up_pool"]) == ("failed", "success")
    log = airflow.task_log(ANY, run, "train")
    assert any("JobFailedError" in line and "reg:nonsense" in line for line in log), log
    wait_until(is_given_back, "the pool as it was")
