"""Searches as jobs on a real local pool without Ray: the same as a search that was never interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightgbm
import mlflow
import optuna
import pytest
from typer.testing import CliRunner

from shoal import ComputePool, RunConfig, jobs
from shoal.cli import app
from shoal.data import DataConnector
from shoal.distributors import attach
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.jobs import mlflow_run
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.os_processes import ProcessId
from shoal.state import Store
from shoal.training.gang.gang import end_gangs
from shoal.training.tracking import Tracking
from shoal.tune import TrialPruned, search, submit_search
from tests.kinds.search.conftest import COLUMNS, table, tuned_rows
from tests.support.homes import new_home
from tests.support.pool_processes import nothing_left
from tests.support.waiting import wait_until
from tests.support.without_ray import nodes_without_ray

__all__ = ["tuned_rows"]

pytestmark = pytest.mark.processes

SPACE = {
    "max_depth": optuna.distributions.IntDistribution(2, 6),
    "learning_rate": optuna.distributions.FloatDistribution(0.05, 0.5, log=True),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComputePool]:
    """One node of two CPUs, without Ray."""
    with new_home():
        pool = ComputePool("local://tuned?cpus_per_node=2&ray=false").up()
        yield pool
        pool.down()
        nothing_left()


def data(rows: Path) -> dict[str, Any]:
    return {
        "dataset": DataConnector.from_parquet(str(rows / "train.parquet")),
        "holdout": DataConnector.from_parquet(str(rows / "holdout.parquet")),
        "input_cols": COLUMNS,
        "label_col": "y",
    }


def test_the_winner_is_what_fit_trains_with_its_parameters(pool, tuned_rows):
    scaling = XGBScalingConfig(num_workers=1, num_cpu_per_worker=2)
    estimator = XGBEstimator(30, "reg:squarederror", {"subsample": 0.8}, scaling_config=scaling)
    given = data(tuned_rows)

    found = search(estimator, SPACE, **given, trials=5, parallel=2, early_stopping_rounds=3)

    assert set(found.best_params) == set(SPACE)
    assert found.best_value == min(found.trials["value"])
    assert found.study.best_value == found.best_value
    assert list(found.trials["number"]) == list(range(5))
    assert list(found.trials.columns[3:5]) == ["config/max_depth", "config/learning_rate"]
    rounds = int(found.trials["rounds"][found.best_trial])
    assert rounds < 30 or found.trials["rounds"].max() <= 30
    fitted = XGBEstimator(
        rounds, "reg:squarederror", {"subsample": 0.8, **found.best_params}, scaling_config=scaling
    ).fit(given["dataset"], COLUMNS, "y")
    assert bytes(found.model.save_raw("ubj")) == bytes(fitted.save_raw("ubj"))
    result = found.job_result
    assert result is not None
    assert result.metrics["holdout-rmse"] == found.best_value
    assert attach(result.job_id).result().best_params == found.best_params


def test_a_holdout_is_split_from_the_dataset_and_the_winner_trains_on_all_rows(pool, tuned_rows):
    scaling = LightGBMScalingConfig(num_workers=1, num_cpu_per_worker=1)
    given = {name: value for name, value in data(tuned_rows).items() if name != "holdout"}

    found = search(
        LightGBMEstimator(8, params={"objective": "regression"}, scaling_config=scaling),
        {"num_leaves": [4, 8, 16]},
        **given,
        trials=5,
        sampler="grid",
        pruner="none",
        parallel=1,
        cpus_per_trial=1,
    )

    assert list(found.trials["state"]) == ["complete"] * 3
    params = {"objective": "regression", **found.best_params}
    fitted = LightGBMEstimator(8, params=params, scaling_config=scaling).fit(given["dataset"], COLUMNS, "y")
    assert found.model.model_to_string() == fitted.model_to_string()
    result = found.job_result
    assert result is not None
    assert result.rows == 2000


def slow_parabola(params: dict[str, float], context: Any) -> float:
    """Wait in the trials from the third on, as long as there is a file `wait`."""
    folder = Path(os.environ["SEARCH_FOLDER"])
    with (folder / "calls").open("a") as file:
        file.write(json.dumps([context.number, params]) + "\n")
    while context.number >= 2 and (folder / "wait").exists():
        time.sleep(0.02)
    context.report((params["x"] - 1) ** 2 + params["y"])
    if context.should_prune():
        raise TrialPruned
    return (params["x"] - 1) ** 2 + params["y"]


RANGES = {"x": optuna.distributions.FloatDistribution(-5, 5), "y": optuna.distributions.FloatDistribution(0, 1)}


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_driver_repeats_no_trial_and_the_next_suggests_what_it_would_have(pool, tmp_path, parallel):
    def submitted(name: str) -> Any:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = RunConfig(pool_name=pool.name, job_id=f"{name}-{parallel}", env={"SEARCH_FOLDER": str(folder)},
                           tracking=None)  # fmt: skip
        sampler = optuna.samplers.TPESampler(n_startup_trials=3)
        return submit_search(
            slow_parabola, RANGES, trials=9, seed=7, parallel=parallel, cpus_per_trial=1, batches=parallel > 1,
            sampler=sampler, run_config=config,
        )  # fmt: skip

    undisturbed = submitted("undisturbed").result()
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "wait").touch()
    call = submitted("killed")
    calls = killed / "calls"

    def has_begun() -> bool:
        # A trial that was sent, but has not begun, is repeated, too, and would be in `calls` only once.
        return calls.exists() and all(f"[{each}, {{" in calls.read_text() for each in range(2, 2 + parallel))

    wait_until(has_begun, "the trials from the third on", seconds=60)
    row = attempts.load(Store(), Key(call.job_id, 1))
    assert row.driver is not None
    ProcessId.from_json(row.driver).signal(signal.SIGKILL)
    with pytest.raises(JobFailedError, match="killed"):
        call.result()
    (killed / "wait").unlink()

    found = submitted("killed").result()

    assert found.job_result.attempt == 2
    columns = ["number", "state", "value", "config/x", "config/y"]
    assert found.trials[columns].to_dict("records") == undisturbed.trials[columns].to_dict("records")
    ran = [json.loads(line)[0] for line in calls.read_text().splitlines()]
    assert sorted(set(ran)) == list(range(9))
    assert {number for number in ran if ran.count(number) > 1} <= set(range(2, 2 + parallel))
    repeated = [each for each in found.study.trials if "shoal:repeated" in each.user_attrs]
    assert len(repeated) == len(ran) - 9


def test_trials_are_runs_below_that_of_the_job(pool, tuned_rows, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = RunConfig(pool_name=pool.name, tracking=Tracking(uri=uri, experiment="searches"))
    given = data(tuned_rows)
    gate = tmp_path / "gate.parquet"
    table(500, 3).to_parquet(gate)

    found = search(
        XGBEstimator(4, scaling_config=XGBScalingConfig(num_workers=1)),
        {"learning_rate": [0.3, -1.0]},
        **given,
        sampler="grid",
        parallel=1,
        run_config=config,
        register={
            "model": "tuned",
            "metric": "mae",
            "holdout": DataConnector.from_parquet(str(gate)),
        },
    )

    result = found.job_result
    assert (result.model_name, result.model_version, result.promoted) == ("tuned", "1", True)
    assert result.metrics.keys() == {"holdout-mae"}  # none on the rows of the search
    client = mlflow_run.connect(uri)
    parent = client.get_run(result.mlflow_run_id)
    assert parent.data.params["learning_rate"] == "0.3"
    children = client.search_runs(
        [parent.info.experiment_id],
        f"tags.mlflow.parentRunId = '{result.mlflow_run_id}'",
        order_by=["tag.`shoal.trial` ASC"],
    )
    assert [child.data.params for child in children] == [{"learning_rate": "0.3"}, {"learning_rate": "-1.0"}]
    assert [child.info.status for child in children] == ["FINISHED", "FAILED"]
    assert children[0].data.metrics["rmse"] == found.best_value
    assert mlflow.get_tracking_uri() != uri

    # The rows on which the search has chosen count as rows that the version knows, also if a frame has them.
    frame = given["holdout"].to_pandas()
    register = {"model": "tuned", "metric": "rmse", "holdout": DataConnector.from_dataframe(frame)}
    with pytest.raises(JobFailedError, match=r"rows that the search chooses the parameters on.*: 800 rows"):
        search(XGBEstimator(4), {"eta": [0.3]}, **{**given, "holdout": frame}, run_config=config, register=register)
    run_id, record = (
        client.get_model_version("tuned", "1").tags["shoal.training_rows"].removeprefix("runs:/").split("/", 1)
    )
    known = json.loads(Path(client.download_artifacts(run_id, record, str(tmp_path))).read_text())
    assert [Path(each["path"]).name for each in known["files"]] == ["train.parquet", "holdout.parquet"]


def opens_runs(params: dict[str, Any], context: Any) -> float:
    if context.number == 0:
        mlflow.log_metrics({"loss": 5, "x": 9})
    elif context.number == 1:
        with mlflow.start_run(run_name="mine"):
            mlflow.log_params({"x": "as I write it"})
            with mlflow.start_run(run_name="inner", nested=True):
                pass
    elif context.number == 2:
        with mlflow.start_run():
            raise ValueError("no")
    elif context.number == 3:
        with mlflow.start_run() as run:
            pass
        mlflow.delete_run(run.info.run_id)
    return params["x"]


def test_a_trial_whose_function_opens_a_run_has_one_run(pool, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = RunConfig(pool_name=pool.name, tracking=Tracking(uri=uri, experiment="functions"))

    found = search(opens_runs, {"x": [1, 2, 3, 4]}, sampler="grid", parallel=1, run_config=config)

    client = mlflow_run.connect(uri)
    job = client.get_run(found.job_result.mlflow_run_id)
    runs = {each.info.run_name: each for each in client.search_runs([job.info.experiment_id])}
    assert len(runs) == len(client.search_runs([job.info.experiment_id])) == 6
    trials = [runs[name] for name in ("trial 0", "mine", "trial 2", "trial 3")]
    assert [each.data.tags["shoal.trial"] for each in trials] == ["0", "1", "2", "3"]
    assert [each.info.status for each in trials] == ["FINISHED", "FINISHED", "FAILED", "FINISHED"]
    assert {each.data.tags["mlflow.parentRunId"] for each in trials} == {job.info.run_id}
    assert trials[0].data.metrics == {"loss": 5.0, "x": 9.0, "value": 1.0}
    assert (trials[0].data.params, trials[1].data.params) == ({"x": "1"}, {"x": "as I write it"})
    assert runs["inner"].data.tags["mlflow.parentRunId"] == runs["mine"].info.run_id


def always_wrong(params: dict[str, Any], context: Any) -> None:
    raise ValueError(f"no value for {params['x']:.0f}")


def with_model(params: dict[str, Any], context: Any) -> None:
    assert len(context.dataset_map["train"].to_pandas()) == 2000
    context.report({"loss": params["x"] ** 2, "other": 1.0}, model=("model of", params["x"]))


def test_the_model_of_a_function_is_what_its_best_trial_has_reported(pool, tuned_rows):
    config = RunConfig(pool_name=pool.name, tracking=None)
    found = search(
        with_model,
        {"x": [3, 1, 2]},
        data(tuned_rows)["dataset"],
        metric="loss",
        direction="minimize",
        sampler="grid",
        run_config=config,
    )
    assert (found.best_params, found.best_value, found.model) == ({"x": 1}, 1.0, ("model of", 1))
    left = sorted(path.name for path in Path(found.job_result.model_path).parent.glob("*.pkl"))
    assert left == ["trial-1.pkl"]


def test_a_search_from_the_command_line_lists_its_trials(pool, tuned_rows, tmp_path):
    spec = {
        "train": {
            "dataset": {"paths": [str(tuned_rows / "train.parquet")]},
            "input_cols": COLUMNS,
            "label_col": "y",
            "n_estimators": 3,
        },
        "space": {"learning_rate": {"choices": [0.3, -1.0]}},
        "sampler": "grid",
        "tracking": None,
    }
    file = tmp_path / "search.json"
    file.write_text(json.dumps(spec))

    said = CliRunner().invoke(app, ["tune", str(file), "--pool", pool.name])

    assert said.exit_code == 0, said.output
    assert re.search(r"0 +complete +[\d.]+ +learning_rate=0\.3", said.stdout)
    assert "search best params" in said.stdout
    again = CliRunner().invoke(app, ["tune", str(file), "--pool", pool.name, "--json"])
    document = json.loads(again.stdout)
    assert [each["params"] for each in document["trials"]] == [{"learning_rate": 0.3}, {"learning_rate": -1.0}]
    assert [each["state"] for each in document["trials"]] == ["complete", "failed"]
    assert document["search"]["best_params"] == {"learning_rate": 0.3}
    file.write_text(json.dumps({**spec, "framework": "xgboost"}))
    assert 'this command takes framework="tune": use `shoal train`' in str(
        CliRunner().invoke(app, ["tune", str(file)]).output
    )


def test_a_search_is_refused_if_its_winner_cannot_be_trained(pool, tuned_rows):
    estimator = XGBEstimator(3, scaling_config=XGBScalingConfig(num_workers=3, num_cpu_per_worker=1))
    with pytest.raises(JobFailedError, match="num_workers=3"):
        search(estimator, {"max_depth": [2, 3]}, **data(tuned_rows))
    assert not any("trial 0" in line for line in jobs.attach(jobs.list_jobs()[0].job_id).logs())


def test_a_search_whose_trials_all_fail_names_the_first_error(pool):
    config = RunConfig(pool_name=pool.name, tracking=None)
    with pytest.raises(JobFailedError, match=r"all 2 trials failed; the first error.*ValueError: no value for 4"):
        search(always_wrong, {"x": [4, 5]}, sampler="grid", run_config=config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {}}, "space is empty"),
        ({"space": {"eta": {"low": 1}}}, "has low and high"),
        ({"space": {"eta": {"low": 2, "high": 1}}}, "low=2 is larger than high=1"),
        ({"space": {"eta": []}}, "a categorical parameter has choices"),
        ({"space": {"eta": {"low": 0, "high": 1, "log": True}}}, "log=true needs low above 0"),
        ({"space": {"eta": {"low": 0, "high": 1}}, "sampler": "grid"}, "needs a parameter's choices"),
        ({"sampler": "tp"}, "sampler"),
        ({"sampler": 5}, "must be a name or an object of optuna.samplers"),
        ({"trials": 0}, "trials"),
        ({"direction": "up"}, "direction"),
        ({"eval_set": {}, "weight": "w"}, "weight"),
        ({"label_col": "nothing"}, "nothing"),
        ({"register": {"model": "m", "metric": "rmse", "skip_if_unchanged": True}}, "holdout"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(fresh_home, tuned_rows, changes, message):
    arguments = {"space": SPACE, **data(tuned_rows), **changes}
    with pytest.raises((InvalidArgumentError, ValueError), match=message):
        search(XGBEstimator(3), arguments.pop("space"), **arguments)
    assert jobs.list_jobs() == []


def test_a_metric_without_direction_and_a_callback_that_stops_early_are_refused_at_once(fresh_home, tuned_rows):
    estimator = XGBEstimator(3, custom_metric=lambda predicted, matrix: ("mine", 1.0))
    options = data(tuned_rows)
    with pytest.raises(InvalidArgumentError, match='set direction="minimize" or direction="maximize"'):
        search(estimator, SPACE, **options)
    rows = options["dataset"]
    with pytest.raises(InvalidArgumentError, match='set direction="minimize" or direction="maximize"'):
        estimator.fit(rows, options["input_cols"], options["label_col"], eval_set=rows, early_stopping_rounds=2)
    stopping = LightGBMEstimator(3, callbacks=[lightgbm.early_stopping(1)])
    with pytest.raises(InvalidArgumentError, match="set early_stopping_rounds of the search"):
        search(stopping, SPACE, **options)
    assert jobs.list_jobs() == []


def test_a_missing_optuna_is_an_error_that_names_the_extra(fresh_home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"shoal\[tune\]"):
        search(always_wrong, {"x": [1]})


def test_a_connected_process_searches_in_its_cluster(tuned_rows):
    with nodes_without_ray(1):
        found = search(
            XGBEstimator(4, scaling_config=XGBScalingConfig(num_workers=1)), {"max_depth": [2, 5]}, **data(tuned_rows),
            sampler="grid",
        )  # fmt: skip
        register = {"model": "m", "metric": "rmse", "holdout": data(tuned_rows)["dataset"]}
        with pytest.raises(InvalidArgumentError, match="register needs a job"):
            search(XGBEstimator(4), {"max_depth": [2, 5]}, **data(tuned_rows), register=register)
        end_gangs()
    assert found.job_result is None
    assert list(found.trials["config/max_depth"]) == [2, 5]
    assert found.model.num_boosted_rounds() == 4
