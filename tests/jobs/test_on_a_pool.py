"""Jobs on a real pool, from submission to the loaded model."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
from sqlalchemy import select

from shoal import ComputePool, jobs
from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.distributors import predict
from shoal.distributors.pytorch import PyTorchDistributor, PyTorchScalingConfig, get_context
from shoal.errors import JobCancelledError, JobFailedError, TrainingError
from shoal.jobs import JobHandle, JobSpec, Register, Tracking, skipping_if_unchanged
from shoal.jobs.files.logs import log_path
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.reconcile.look import JobClient
from shoal.os_processes import ProcessId
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import JOB_ACTIVE, Job, JobState
from shoal.training.demand import XGBScalingConfig
from shoal.training.locations import MARKER
from shoal.training.reporting import Progress
from shoal.training.run_config import RunConfig
from tests.support.s3_server import s3_server, upload
from tests.support.waiting import wait_until
from tests.support.wheels import write_wheel

pytestmark = pytest.mark.ray

ENGINE = "airflow:dag/run"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name, rows in (("train", 20_000), ("holdout", 2_000)):
        frame = pd.DataFrame({"a": random.random(rows), "b": random.random(rows)})
        frame.assign(y=frame["a"] * 3 + frame["b"]).to_parquet(folder / f"{name}.parquet", row_group_size=1_000)
    return folder


@pytest.fixture(scope="module")
def tracking(mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(uri=f"sqlite:///{shutil.copy(mlflow_database, tmp_path_factory.mktemp('mlflow'))}")


@pytest.fixture
def spec(pool: ComputePool, data: Path, tracking: Tracking) -> JobSpec:
    holdout = DataConnector.from_parquet(data / "holdout.parquet")
    return JobSpec(
        dataset=DataConnector.from_parquet(data / "train.parquet"),
        input_cols=("a", "b"),
        label_col="y",
        eval_set=holdout,
        n_estimators=10,
        params={"objective": "reg:squarederror"},
        verbose_eval=True,
        scaling_config=XGBScalingConfig(num_workers=2, num_cpu_per_worker=1),
        run_config=RunConfig(pool_name=pool.name),
        register=Register(model="e2e", metric="rmse", holdout=holdout),
        tracking=tracking,
    )


def forever(spec: JobSpec, **run_config: object) -> JobSpec:
    """A training that ends only when it is made to."""
    return plain(spec, **run_config).model_copy(update={"n_estimators": 10_000_000, "verbose_eval": 100})


def plain(spec: JobSpec, **run_config: object) -> JobSpec:
    """The same without MLflow, which a driver takes seconds to import and to log a model with."""
    config = spec.run_config.model_copy(update=run_config)
    return spec.model_copy(update={"run_config": config, "register_as": None, "tracking": None})


def driver_of(handle: JobHandle) -> ProcessId:
    """The driver, once it trains."""

    def training() -> ProcessId | None:
        with Store().transaction() as session:
            job = session.get_one(Job, (handle.job_id, handle.attempt))
        assert job.error is None, job.error
        begun = job.driver and any("eval-rmse" in line for line in handle.logs())
        return ProcessId.from_json(job.driver) if begun else None

    return wait_until(training, "the first rounds", 120)


@pytest.mark.server
def test_workers_read_files_of_a_storage(spec: JobSpec, data: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = DatasetSpec.model_validate({"paths": ["s3://air/train.parquet"], "storage": "lake"})
    with s3_server() as settings:
        upload(settings, data, "air")
        settings = {name: value for name, value in settings.items() if name != "role_arn"}
        monkeypatch.setenv("SHOAL_STORAGE_LAKE", json.dumps(settings))

        result = jobs.submit(plain(spec).model_copy(update={"dataset": dataset})).wait(on_log=None)

    assert (result.rows, result.num_workers) == (20_000, 2)
    assert result.model_digest == jobs.submit(plain(spec)).wait(on_log=None).model_digest
    kept = [path for path in home().rglob("*") if path.is_file()]
    assert not [path for path in kept if settings["aws_secret_access_key"].encode() in path.read_bytes()]


def gang_is_gone(pool: ComputePool) -> bool:
    return not any(node.busy for node in pool.describe().active)


def test_train_register_beat_the_champion_and_predict(
    spec: JobSpec, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    with sqlite3.connect(data / "warehouse.db") as database:
        pd.read_parquet(data / "train.parquet").to_sql("train", database, index_label="row")
    monkeypatch.setenv("SHOAL_CONNECTION_WAREHOUSE", f"sqlite:///{data}/warehouse.db")
    queried = DatasetSpec(sql="SELECT a, b, y FROM train ORDER BY row", connection="warehouse")

    first = jobs.submit(spec).wait(on_log=lines.append)
    again = spec.model_copy(update={"n_estimators": 30, "dataset": queried})
    second = jobs.submit(again).wait(on_log=None)
    third = jobs.submit(skipping_if_unchanged(again, None)).wait(on_log=lines.append)

    assert second.data is not None
    assert (second.data.rows, second.data.digest) == (
        20_000,
        DataConnector.from_parquet(data / "train.parquet", filters=[("a", ">=", 0)]).digest(),
    )
    assert (first.rows, first.num_workers, first.model_version, first.promoted) == (20_000, 2, "1", True)
    assert (second.model_version, second.promoted) == ("2", True)
    assert (third.model_version, third.num_workers, third.data) == ("2", 0, second.data)
    assert f"skipped: {third.skipped}" in lines
    assert second.champion is not None
    assert second.champion.value == first.metrics["holdout-rmse"]
    assert len(first.peak_memory_per_worker) == 2
    assert sum("eval-rmse" in line for line in lines) == 10
    assert any("MLflow run:" in line for line in lines)
    last = jobs.attach(first.job_id).status().progress
    assert last is not None
    assert (last.done, last.total, last.metrics) == (10, 10, {"eval-rmse": first.metrics["eval-rmse"]})
    trained = jobs.load_training(first)
    assert trained.booster().num_boosted_rounds() == 10
    assert trained.eval_results["eval"]["rmse"][-1] == first.metrics["eval-rmse"]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(spec.tracking.uri))
    holdout = DataConnector.from_parquet(data / "holdout.parquet")
    run_config = RunConfig(pool_name=spec.run_config.pool_name)
    predicted = predict("models:/e2e@champion", holdout, tmp_path / "scores", keep_cols=["y"], run_config=run_config)
    assert (predicted.rows, predicted.model_uri) == (2_000, "models:/e2e/2")
    scores = DataConnector.from_parquet(predicted.output_path).to_pandas()
    rmse = float(np.sqrt(np.mean((scores["y"] - scores["prediction"]) ** 2)))
    assert rmse == pytest.approx(second.metrics["holdout-rmse"])


def test_a_killed_driver_is_noticed_and_another_process_cancels_the_next_attempt(pool: ComputePool, spec: JobSpec):
    handle = jobs.submit(forever(spec, job_id="killed"), holder=ENGINE)
    driver_of(handle).signal(signal.SIGKILL)

    with pytest.raises(JobFailedError, match="was killed"):
        handle.wait(on_log=None)
    wait_until(lambda: gang_is_gone(pool), "the gang's end")

    again = jobs.submit(forever(spec, job_id="killed"), holder=ENGINE)
    assert (again.job_id, again.attempt) == (handle.job_id, handle.attempt + 1)
    driver = driver_of(again)
    progress = wait_until(lambda: again.status().progress, "a record in the middle of the first segment", 60)
    assert (0 < progress.done < progress.total, progress.total, progress.unit) == (True, 10_000_000, "rounds")
    assert progress.metrics.keys() == {"eval-rmse"}

    assert jobs.submit(forever(spec, job_id="killed"), holder=ENGINE).attempt == again.attempt
    assert jobs.cancel(again.job_id)

    wait_until(lambda: not driver.alive(), "the driver's end")  # on a busy machine it outlives the 15 s of `cancel`
    wait_until(lambda: gang_is_gone(pool), "the gang's end")
    with pytest.raises(JobCancelledError, match="on request"):
        jobs.attach(again.job_id).wait(on_log=None)

    # The attempt after a killed and a cancelled one trains to its end.
    last = jobs.submit(plain(spec, job_id="killed"), holder=ENGINE)
    assert (last.attempt, last.wait(on_log=None).rows) == (again.attempt + 1, 20_000)


def test_an_orphan_ends_itself(spec: JobSpec):
    handle = jobs.submit(forever(spec, orphan_after=5.0))
    wait_until(lambda: handle.status().state is JobState.RUNNING, "the driver", 120)  # asking keeps it alive
    with Store().reading() as session:
        driver = ProcessId.from_json(session.get_one(Job, (handle.job_id, handle.attempt)).driver)

    wait_until(lambda: not driver.alive(), "the driver's end", 60)

    status = jobs.attach(handle.job_id).status()
    assert status.state is JobState.CANCELLED
    assert "no process has polled" in str(status.error)


def test_a_submission_without_the_token_is_refused(pool: ComputePool):
    endpoint = pool.endpoint()

    answer = httpx.post(f"{endpoint.api}/api/jobs/", json={"entrypoint": "true", "submission_id": "intruder"})

    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert "intruder" not in os.listdir(endpoint.token_path.parent)


@pytest.mark.long
def test_six_jobs_at_once_with_room_for_two_run_two_at_a_time(
    real_pool: ComputePool, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted when a driver is sent, and again by the times in the store, which are of one clock."""
    real_pool.scale(2)
    at_once: list[int] = []
    send = JobClient.submit

    def counted(client: JobClient, *request: Any, **options: Any) -> bool:
        with Store().reading() as session:
            admitted = Job.admitted_at.is_not(None), Job.state.in_(JOB_ACTIVE)
            at_once.append(len(session.scalars(select(Job.id).where(*admitted)).all()))
        return send(client, *request, **options)

    monkeypatch.setattr(JobClient, "submit", counted)
    one_worker = {"n_estimators": 1, "scaling_config": XGBScalingConfig(num_workers=1, num_cpu_per_worker=1)}

    def train(number: int) -> list[str]:
        lines: list[str] = []
        named = plain(spec, job_id=f"at-once-{number}").model_copy(update=one_worker)
        jobs.submit(named).wait(on_log=lines.append)
        return lines

    with ThreadPoolExecutor(6) as executor:
        logs = list(executor.map(train, range(6)))

    assert 1 <= len(at_once) <= 6  # drivers that end and the reconciler's process may start some
    assert max(at_once) <= 2
    assert sum(any("waiting for room" in line for line in lines) for lines in logs) >= 1
    rows = [attempts.load(Store(), Key(f"at-once-{number}", 1)) for number in range(6)]
    assert all(row.state is JobState.SUCCEEDED for row in rows)
    for row in rows:
        assert sum(other.started_at <= row.started_at < other.ended_at for other in rows) <= 2


def test_a_job_without_num_workers_leaves_the_nodes_of_other_leases_alone(real_pool: ComputePool, spec: JobSpec):
    """Otherwise one would wait for the other, and the first would lose a worker at the end of the second lease."""
    real_pool.scale(1)
    all_nodes = plain(spec).model_copy(update={"scaling_config": XGBScalingConfig()})
    first, second = (ComputePool(real_pool.name, holder=f"test:{name}") for name in ("first", "second"))
    with first.lease(1, exclusive=True):
        with second.lease(1, exclusive=True):
            running = jobs.submit(forever(all_nodes), holder=first.holder)
            driver_of(running)
            beside = jobs.submit(all_nodes, holder=second.holder).wait(on_log=None)
        wait_until(lambda: len(real_pool.get_nodes()) == 1, "the node of the second lease to end")
        log = list(running.logs())
        wait_until(lambda: len(list(running.logs())) > len(log), "the training to go on")
        running.cancel()

    assert beside.num_workers == 1
    assert not [line for line in log if "restart" in line]


def log_and_return(factor: float) -> tuple[float, str]:
    """What a job's function does in its workers: its own metrics, MLflow's own calls, a file, a password printed."""
    import hashlib

    import mlflow

    context = get_context()
    reporter = context.get_metrics_reporter()
    for step in range(3):
        reporter.log_metrics({"loss": 1 / (step + 1)})
    mlflow.log_metric(f"own-{context.get_rank()}", factor)
    (Path(context.get_model_dir()) / f"part-{context.get_rank()}").write_text("weights")
    password = context.get_hyper_params()["password"]
    print(f"connecting to postgresql://me:{password}@db with {os.environ['MLFLOW_TRACKING_PASSWORD']}", flush=True)
    return factor * context.get_rank(), hashlib.sha256(password.encode()).hexdigest()


def fail_in_rank_1() -> None:
    """Rank 1 raises, and rank 0 waits for it."""
    import torch

    torch.distributed.init_process_group("gloo")
    if get_context().get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    torch.distributed.barrier()


def test_a_function_runs_as_a_job_is_tracked_and_its_secrets_reach_nothing_else(
    pool: ComputePool, tracking: Tracking, session_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    import mlflow
    import psutil

    assert tracking.uri is not None
    password, token = f"p/{secrets.token_hex(8)}#?@", secrets.token_hex(12)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", token)
    config = RunConfig(pool_name=pool.name, job_id="function", artifact_location=str(tmp_path))
    function = PyTorchDistributor(log_and_return, PyTorchScalingConfig(num_nodes=2), config)
    commands: set[str] = set()

    def look() -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                commands.add("\0".join(process.cmdline()))

    monkeypatch.setattr("shoal.distributors.call.say", lambda line: (look(), lines.append(line)))
    lines: list[str] = []
    hyper_params = {"password": password, "database": f"postgresql://me:{password}@db/x"}
    response = function.run(4.0, hyper_params=hyper_params)

    digest = hashlib.sha256(password.encode()).hexdigest()
    assert response.get_results() == [(0.0, digest), (4.0, digest)]
    assert response.get_metrics() == {"loss": 1 / 3}
    assert response.get_model_dir() == f"{tmp_path}/model/function"
    assert sorted(path.name for path in Path(response.get_model_dir()).iterdir()) == [MARKER, "part-0", "part-1"]
    status = jobs.attach("function").status()
    assert status.progress == Progress(2, None, "steps", {"loss": 1 / 3})
    done = status.result
    assert done is not None
    assert done.num_workers == len(done.peak_memory_per_worker) == 2
    client = mlflow.MlflowClient(tracking.uri)
    assert done.mlflow_run_id is not None
    assert [metric.value for metric in client.get_metric_history(done.mlflow_run_id, "loss")] == [1.0, 1 / 2, 1 / 3]
    run = client.get_run(done.mlflow_run_id)
    wait_until(lambda: client.get_run(done.mlflow_run_id).info.status == "FINISHED", "the end of the run")
    system, logged = system_metrics(run)
    assert logged == {"loss": 1 / 3, "rank-1/loss": 1 / 3, "own-0": 4.0, "own-1": 4.0}
    assert system.keys() == {f"worker-{rank}/{name}" for rank in range(2) for name in done.peak_usage_per_worker[0]}
    assert done.peak_usage_per_worker[1]["memory_usage_megabytes"] >= system["worker-1/memory_usage_megabytes"] > 10
    assert run.data.params["function"] == "log_and_return"
    assert done.node_seconds is not None and status.node_seconds is not None
    assert 0 < done.node_seconds <= 2 * done.seconds
    assert done.node_seconds <= run.data.metrics["system/node_seconds"] == pytest.approx(status.node_seconds)

    job = attempts.load(Store(), Key("function", 1))
    assert job.spec["hyper_params"] == {"password": "***", "database": "postgresql://db/x"}
    log = log_path(Key("function", 1))
    assert log.read_text().count("connecting to postgresql://db with ***") == 2
    secret = [part.encode() for part in (password, password[2:-3], token)]
    mlflow_store = Path(tracking.uri.removeprefix("sqlite:///"))
    stored = [log, *session_home.glob("state.db*"), *mlflow_store.parent.glob("mlflow.db*")]
    seen = [text.encode() for text in [repr(job.result), repr(response), *lines, *commands]]
    for file in stored:
        with contextlib.suppress(FileNotFoundError):  # the journal of SQLite goes with the last connection
            seen.append(file.read_bytes())
    assert len(seen) > 10
    assert not [text for text in seen for part in secret if part in text]
    assert not list((session_home / "credentials").glob("function*"))


def system_metrics(run: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the workers' system metrics, without the prefix, and all metrics but those of the system."""
    metrics = dict(run.data.metrics)
    del metrics["system/node_seconds"]
    for name in [name for name in metrics if name.startswith("seconds/")]:
        del metrics[name]
    system = {name: metrics.pop(name) for name in list(metrics) if name.startswith("system/")}
    return {name.removeprefix("system/"): value for name, value in system.items()}, metrics


def choose_experiment(path: str) -> tuple[str, str]:
    """All ranks call `set_experiment`, as with one process; rank 1 is killed once, after it."""
    import mlflow
    import torch

    torch.distributed.init_process_group("gloo")
    context = get_context()
    mlflow.set_experiment(path)
    mlflow.log_metric(f"own-{context.get_rank()}", 1.0)
    context.get_metrics_reporter().log_metrics({"loss": 0.5})
    torch.distributed.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if context.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()
    jobs_run = mlflow.active_run().info.run_id
    while sum("disk_usage_percentage" in name for name in mlflow.get_run(jobs_run).data.metrics) < 2:
        time.sleep(0.2)  # until both nodes are measured
    mlflow.end_run()
    with mlflow.start_run() as own:
        return jobs_run, own.info.run_id


def test_a_function_chooses_the_experiment_of_the_jobs_run(
    pool: ComputePool, tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    from mlflow.entities import ViewType

    assert tracking.uri is not None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    config = RunConfig(
        pool_name=pool.name,
        job_id="chosen",
        artifact_location=str(tmp_path),
        max_restarts=1,
        tracking=Tracking(tags={"team": "x"}, system_metrics=True),
    )
    function = PyTorchDistributor(choose_experiment, PyTorchScalingConfig(num_nodes=2), config)
    mlflow.set_tracking_uri(tracking.uri)
    with mlflow.start_run() as parent:
        response = function.run("/Users/me/digits")

    (run_id, own), (same, another) = response.get_results()
    result = jobs.attach("chosen").status().result
    assert result is not None
    assert (run_id, same, result.restarts) == (result.mlflow_run_id, result.mlflow_run_id, 1)
    assert len({run_id, own, another}) == 3
    client = mlflow.MlflowClient(tracking.uri)
    wait_until(lambda: client.get_run(run_id).info.status == "FINISHED", "the end of the run")
    run, experiment = client.get_run(run_id), client.get_experiment_by_name("/Users/me/digits")
    assert run.info.experiment_id == client.get_run(own).info.experiment_id == experiment.experiment_id
    beside = Path(tracking.uri.removeprefix("sqlite:///")).with_name("artifacts")
    assert experiment.artifact_location.startswith(f"file://{beside}/")
    assert (run.info.run_name, run.data.tags["shoal.job_id"]) == ("chosen-1", "chosen")
    assert (run.data.tags["team"], run.data.tags["mlflow.parentRunId"]) == ("x", parent.info.run_id)
    assert client.get_run(run.data.tags["shoal.first_run"]).info.experiment_id == parent.info.experiment_id
    assert run.data.params["function"] == "choose_experiment"
    system, logged = system_metrics(run)
    assert logged == {"own-0": 1.0, "own-1": 1.0, "loss": 0.5, "rank-1/loss": 0.5}
    measured = {name.partition("/")[0] for name in system if name.endswith("/disk_usage_percentage")}
    assert len(measured) >= 2  # a worker that replaces a lost one may run on another node
    assert measured <= {node["name"] for node in pool.get_nodes()}
    first = client.get_run(run.data.tags["shoal.first_run"])
    wait_until(lambda: client.get_run(first.info.run_id).info.lifecycle_stage == "deleted", "the first run's end")
    found = client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL)
    assert {run.info.run_id for run in found} == {run_id, own, another}
    links = [line for line in jobs.attach("chosen").logs() if line.startswith("MLflow run: ")]
    assert [run_id in line for line in links] == [False, True]


def test_a_jobs_log_ends_with_the_first_ranks_traceback_and_the_cause(pool: ComputePool, tmp_path: Path) -> None:
    config = RunConfig(pool_name=pool.name, job_id="fails", artifact_location=str(tmp_path))
    with pytest.raises(TrainingError, match=r"rank 1 \(node .*\) failed: ZeroDivisionError: on purpose") as info:
        PyTorchDistributor(fail_in_rank_1, PyTorchScalingConfig(num_nodes=2), config).run()
    [note] = info.value.__notes__
    assert note.startswith("In rank 1 (node")
    assert note.endswith("ZeroDivisionError: on purpose")
    log = list(jobs.attach("fails").logs())
    assert "ZeroDivisionError: on purpose" in log[-1]
    assert any("in fail_in_rank_1" in line for line in log[-12:])
    assert not (tmp_path / "model").exists() or not list((tmp_path / "model").iterdir())


def look_around() -> dict[str, Any]:
    import mypkg.deep
    import tidbit

    Path(f"of-{get_context().get_rank()}").write_text("a download")
    print("the pin is", os.environ["MY_PIN"])
    own = {"folder": str(Path.cwd()), "answer": tidbit.ANSWER, "where": mypkg.deep.WHERE, "plain": os.environ["PLAIN"]}
    return {**own, "reversed": os.environ["MY_PIN"][::-1]}


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_a_function_brings_its_environment_and_runs_in_a_folder_of_its_job(
    pool: ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = secrets.token_hex(8)
    monkeypatch.setenv("MY_PIN", pin)
    write_wheel(tmp_path, "tidbit", "1.0", "ANSWER = 42", requires=["psutil"])
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").touch()
    (tmp_path / "mypkg" / "deep.py").write_text("WHERE = __file__")
    config = RunConfig(
        pool_name=pool.name,
        job_id="brings",
        env={"PLAIN": "1", "UV_FIND_LINKS": str(tmp_path), "UV_OFFLINE": "1"},
        secret_env=["MY_PIN"],
        packages=["tidbit==1.0"],
        code=[tmp_path / "mypkg"],
        artifact_location=str(tmp_path / "out"),
    )

    response = PyTorchDistributor(look_around, PyTorchScalingConfig(num_nodes=2), config).run()

    first, second = response.get_results()
    assert (first["answer"], first["plain"], first["reversed"]) == (42, "1", pin[::-1])
    assert "/shoal_code/mypkg/" in first["where"]
    assert first["folder"] == second["folder"] == str(home() / "work" / "brings-1")
    assert not Path(first["folder"]).exists()
    log = "\n".join(jobs.attach("brings").logs())
    assert "installed tidbit==1.0" in log and "the pin is ***" in log
    with Store().reading() as session:
        assert pin not in str([job.spec for job in session.scalars(select(Job))])


def test_many_models_from_one_table_of_which_two_fail_alone(pool: ComputePool, tracking: Tracking, tmp_path: Path):
    """As a workflow's run maps over the specs: all jobs at once, each by a task of its own."""
    table = pd.DataFrame({"kind": ["good", "null"] * 40, "x": [float(i // 2 % 10) for i in range(80)]})
    table["y"] = table["x"].where(table["kind"] == "good")
    table[:60].to_parquet(tmp_path / "train")
    table[60:].to_parquet(tmp_path / "holdout")
    specs = jobs.for_each(
        {
            "dataset": {"paths": [str(tmp_path / "train")]},
            "input_cols": ["x"],
            "label_col": "y",
            "n_estimators": 3,
            "scaling_config": {"num_workers": 1},
            "register": {"model": "kind-{kind}", "metric": "rmse", "holdout": {"paths": [str(tmp_path / "holdout")]}},
            "tracking": tracking.model_dump(),
            "run_config": {"pool_name": pool.name},
        },
        column="kind",
        values=["good", "null", "absent"],
    )

    def task(index: int) -> tuple[str, Any]:
        # Each retry of a task, and no other task, finds the task's own job.
        handles = [jobs.submit(jobs.parse_spec(specs[index]), holder=ENGINE, key=f"train/{index}") for _ in range(2)]
        assert handles[0].job_id == handles[1].job_id
        try:
            return handles[1].job_id, handles[1].wait()
        except JobFailedError as error:
            return handles[1].job_id, error

    with ThreadPoolExecutor() as threads:
        ended = list(threads.map(task, range(len(specs))))

    lines = jobs.summary(specs, [result for _, result in ended])
    models = [(line.model, line.outcome) for line in lines]
    assert models == [("kind-good", "promoted"), ("kind-null", "failed"), ("kind-absent", "failed")]
    assert '"y"' in lines[1].sentence and "no row of" in lines[2].sentence
    assert ended[0][1].rows == 30
    assert len({job_id for job_id, _ in ended}) == 3
