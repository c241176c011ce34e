"""The models of all partitions as one version in MLflow: it passes the gate, and predicts each row with its model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost
from typer.testing import CliRunner

from shoal import ComputePool, RunConfig, many
from shoal.cli import app
from shoal.data import DataConnector
from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.jobs import (
    JobResult,
    Tracking,
    attach,
    list_jobs,
    load_partitions,
    models_spec_of,
    partitions_so_far,
    submit,
)
from shoal.kinds.partitions import logged_model
from shoal.models.catalog import model_history
from shoal.state.schema import JobState
from tests.support.homes import new_home

pytestmark = pytest.mark.processes

COLUMNS = ["a", "b"]


@pytest.fixture(scope="module")
def tracking(mlflow_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracking]:
    """A home with a pool, and a database of MLflow."""
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    shutil.copy(mlflow_database, file)
    with new_home():
        pool = ComputePool("local://small?max_nodes=1&cpus_per_node=2&ray=false").up()
        yield Tracking(uri=f"sqlite:///{file}")
        pool.down()


def rows_of(seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": random.random(1_200), "b": random.integers(0, 9, 1_200)})
    frame["store"] = random.choice(["north", "south", "west"], 1_200)
    slopes = frame["store"].map({"north": 3.0, "south": -3.0, "west": 1.0})
    return frame.assign(y=slopes * frame["a"] + frame["b"])


class Trained:
    """Trains a booster with the given number of rounds, and fails for one store."""

    def __init__(self, rounds: int, fails: str = "") -> None:
        self.rounds = rounds
        self.fails = fails

    def __call__(self, rows: pd.DataFrame, key: str) -> xgboost.Booster:
        if key == self.fails:
            raise ValueError("no model today")
        return xgboost.train({"nthread": 1}, xgboost.DMatrix(rows[COLUMNS], rows["y"]), self.rounds)


def test_a_version_passes_the_gate_and_a_failed_partition_keeps_the_model_of_the_champion(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    rows_of(0).to_parquet(tmp_path / "train.parquet", row_group_size=500)
    rows_of(1).to_parquet(tmp_path / "holdout.parquet")
    data = DataConnector.from_parquet(tmp_path / "train.parquet")
    register = {
        "model": "sales",
        "metric": "rmse",
        "by": "store",
        "holdout": DataConnector.from_parquet(tmp_path / "holdout.parquet"),
        "label_col": "y",
        "input_cols": COLUMNS,
    }
    config = RunConfig(tracking=tracking)

    def trained(rounds: int, fails: str = "") -> tuple[many.PartitionResults, Any]:
        results = many.train(Trained(rounds, fails), data, "store", run_config=config, register=register)
        return results, list_jobs()[0].result

    first, result = trained(3)
    assert (result.model_version, result.promoted, result.partitions) == ("1", True, {"succeeded": 3, "failed": 0})
    second, result = trained(20, fails="west")
    assert (result.model_version, result.promoted, result.partitions) == ("2", True, {"succeeded": 2, "failed": 1})
    assert result.champion.version == "1"

    mlflow.set_tracking_uri(tracking.uri)
    holdout = rows_of(1)
    expected = pd.Series(np.nan, index=holdout.index)
    for store, part in holdout.groupby("store"):
        model = (first if store == "west" else second)[store].value
        expected[part.index] = model.predict(xgboost.DMatrix(part[COLUMNS]))
    rmse = float(np.sqrt(np.mean((expected - holdout["y"]) ** 2)))
    assert result.metrics["holdout-rmse"] == pytest.approx(rmse, rel=1e-6)

    version = mlflow.pyfunc.load_model("models:/sales@champion")
    assert version.metadata.metadata["shoal"] == {"partitions": 3, "kept": 1}
    frame = holdout[["store", *COLUMNS]]  # "b" has integers, as in the training
    np.testing.assert_allclose(version.predict(frame), expected, rtol=1e-6)
    unknown = frame.head(4).assign(store=["north", "moon", "south", "moon"])
    assert np.isnan(version.predict(unknown)).tolist() == [False, True, False, True]

    kept = logged_model.model_of("models:/sales/2")
    assert kept is not None
    found = kept.results
    assert (
        found["west"].error
        == "this is the model of models:/sales/1, because the training failed: ValueError: no model today"
    )
    assert found["west"].content() == first["west"].content()

    # Without an address of MLflow, the models are those in the database of jobs.
    monkeypatch.setattr("shoal.jobs.mlflow_run.default_uri", lambda: tracking.uri)
    mlflow.set_tracking_uri(None)
    by_partition = many.predict("models:/sales@champion", register["holdout"], "store", run_config=config)
    table = pd.concat(by_partition.rows())
    np.testing.assert_allclose(
        table.sort_values(["a"])["prediction"], expected[holdout.sort_values("a").index], rtol=1e-6
    )


def trained_noting(rows: pd.DataFrame, key: str, folder: Path) -> xgboost.Booster:
    with (folder / "calls").open("a") as file:
        file.write(f"{key}\n")
    return Trained(3, "" if (folder / "heal").exists() else "west")(rows, key)


def test_too_many_failed_partitions_fail_the_job_after_all_others_and_a_retry_repeats_only_them(
    tracking: Tracking, tmp_path: Path
) -> None:
    rows_of(0).to_parquet(tmp_path / "train.parquet")
    rows_of(1).to_parquet(tmp_path / "holdout.parquet")
    holdout = {"paths": [str(tmp_path / "holdout.parquet")]}
    register = {"model": "limited", "metric": "rmse", "holdout": holdout, "label_col": "y", "input_cols": COLUMNS}

    def run(job_id: str, **changes: Any) -> JobResult:
        fields = {"dataset": {"paths": [str(tmp_path / "train.parquet")]}, "by": "store", "register": register}
        config = {"pool_name": "small", "job_id": job_id}
        fields |= {"tracking": tracking, "run_config": config, **changes}
        return submit(models_spec_of(fields, function=trained_noting, kwargs={"folder": tmp_path})).wait()

    why = "1 of 3 partitions have failed: 'west': ValueError: no model today"
    with pytest.raises(JobFailedError, match="the results of the other 2 are stored") as raised:
        run("nightly")
    assert f"{why}; max_failed=0 allows fewer: limited version 1 waits for a decision" in str(raised.value)
    assert not raised.value.permanent
    status = attach("nightly").status()
    assert (status.state, status.result.promoted, status.result.failed_text) == (JobState.FAILED, None, why)
    assert status.result.decision.sentence.endswith(why)
    assert "nan" not in status.result.decision.sentence
    models = load_partitions(status.result)
    assert models["south"].value.num_boosted_rounds() == 3

    south = models["south"].content()
    assert partitions_so_far("nightly")["south"].content() == south
    shown = CliRunner().invoke(app, ["jobs", "show", "nightly"]).stdout
    assert "'west': ValueError: no model today" in shown and "{'" not in shown

    (tmp_path / "calls").write_text("")
    with pytest.raises(JobFailedError, match="limited version 2 waits for a decision"):
        run("nightly", max_failed=0.1)  # judges the same job
    (tmp_path / "heal").touch()
    result = run("nightly")
    assert (tmp_path / "calls").read_text().split() == ["west"] * 2
    assert (result.attempt, result.promoted, result.model_version) == (3, True, "3")
    assert [each.version for each in model_history("limited", tracking_uri=tracking.uri)] == ["3"]
    assert result.partitions == {"succeeded": 3, "failed": 0}
    assert load_partitions(result)["south"].content() == south
    earlier = load_partitions(status.result)
    assert (earlier["south"].content(), earlier["west"].status) == (south, "failed")

    (tmp_path / "heal").unlink()
    for job_id, limit in (("number", "1"), ("share", "0.34"), ("all", 1.0), ("python", None)):
        result = run(job_id, max_failed=limit)
        assert (result.failure, result.promoted, result.decision.sentence.endswith(why)) == (None, False, True)
    with pytest.raises(JobFailedError, match=r"max_failed=0\.33 allows fewer"):
        run("small-share", max_failed=0.33)
    for wrong in (-1, 1.5, True, "many"):
        with pytest.raises(InvalidArgumentError, match="max_failed"):
            run("wrong", max_failed=wrong)


def test_what_cannot_be_registered_is_refused_before_the_training(tracking: Tracking, tmp_path: Path) -> None:
    rows_of(0).to_parquet(tmp_path / "train.parquet")
    data = DataConnector.from_parquet(tmp_path / "train.parquet")
    register = {"model": "sales", "metric": "rmse", "holdout": data}
    for extra, said in (
        ({}, "register needs the columns of the models"),
        ({"label_col": "y", "input_cols": COLUMNS, "skip_if_unchanged": True}, "skip_if_unchanged is not possible"),
        ({"label_col": "y", "input_cols": COLUMNS, "metric": "ndcg@5"}, "a ranking metric is not possible"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            many.train(Trained(1), data, "store", register={**register, **extra})
