"""Batch prediction on a real cluster, with models from a real MLflow registry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.errors import DataError, InvalidArgumentError, JobError
from shoal.jobs.prediction import engine
from shoal.jobs.specs.prediction import PredictJobSpec, PredictResult
from shoal.training.locations import Claim
from shoal.training.reporting import Progress
from tests.support.two_node_cluster import COLUMNS, ROWS, TwoNodes, write_rows

pytestmark = pytest.mark.ray


progress: list[Progress] = []
"""What the predictions of the test that runs have reported."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of an MLflow store with a booster under delays@champion."""
    import mlflow
    import xgboost

    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.create_experiment("models", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment("models")
    frame = DataConnector.from_parquet(write_rows(folder / "rows")).to_pandas()
    booster = xgboost.train({"max_depth": 3}, xgboost.DMatrix(frame[COLUMNS], frame["y"]), 5)
    mlflow.xgboost.log_model(booster, name="model", registered_model_name="delays")
    mlflow.MlflowClient().set_registered_model_alias("delays", "champion", "1")
    return uri


@pytest.fixture
def predict(driver: TwoNodes, registry: str, rows: Path, tmp_path: Path) -> Callable[..., PredictResult]:
    import mlflow

    mlflow.set_tracking_uri(registry)
    progress.clear()

    def call(job: str = "job", **fields: Any) -> PredictResult:
        request = PredictJobSpec(
            **{
                "model": "models:/delays@champion",
                "dataset": DataConnector.from_parquet(rows),
                "output_path": str(tmp_path / "out"),
                "scaling_config": {"num_workers": 2},
                **fields,
            }
        )
        environment = {"MLFLOW_TRACKING_URI": registry}
        return engine.run(request, claim=Claim(job, "me"), env=environment, on_progress=progress.append)

    return call


def test_two_workers_predict_as_one_process_does(predict, rows, tmp_path, capsys):
    import mlflow

    result = predict()
    assert (result.rows, result.num_workers, result.model_uri) == (ROWS, 2, "models:/delays/1")
    assert (progress[-1].brief, len(progress)) == (f"row {ROWS} of {ROWS}", 6)
    frame = DataConnector.from_parquet(rows).to_pandas()
    predicted = DataConnector.from_parquet(tmp_path / "out").to_pandas()
    pd.testing.assert_frame_equal(predicted.drop(columns="prediction"), frame)
    alone = mlflow.xgboost.load_model("models:/delays/1").inplace_predict(frame[COLUMNS].to_numpy())
    np.testing.assert_array_equal(predicted["prediction"], alone)

    again = predict("a rerun")
    assert (again.num_workers, again.rows) == (0, ROWS)
    assert "already has the predictions of models:/delays/1 for these rows" in capsys.readouterr().out
    with pytest.raises(InvalidArgumentError, match="or set overwrite=True"):
        predict("another", keep_cols=["y"])
    predict("another", keep_cols=["y"], overwrite=True, prediction_col="delay")
    assert DataConnector.from_parquet(tmp_path / "out").schema().names == ["y", "delay"]


def test_margins_of_several_classes_are_added_as_xgboost_adds_them(predict, rows, tmp_path):
    import mlflow
    import xgboost

    frame = DataConnector.from_parquet(rows).to_pandas()
    margins = np.random.default_rng(0).normal(size=(ROWS, 3))
    data = xgboost.DMatrix(frame[COLUMNS], np.arange(ROWS) % 3, base_margin=margins)
    model = xgboost.train({"objective": "multi:softprob", "num_class": 3, "nthread": 1}, data, 3)
    metadata = {"shoal": {"base_margin_cols": ["m0", "m1", "m2"]}}
    mlflow.xgboost.save_model(model, tmp_path / "model", pip_requirements=[], metadata=metadata)
    frame.assign(m0=margins[:, 0], m1=margins[:, 1], m2=margins[:, 2]).to_parquet(tmp_path / "margins.parquet")

    predict(
        model=str(tmp_path / "model"),
        dataset=DataConnector.from_parquet(tmp_path / "margins.parquet"),
        keep_cols=[],
        scaling_config={"num_workers": 1},
    )

    predicted = DataConnector.from_parquet(tmp_path / "out").to_pandas()
    names = [f"prediction_{number}" for number in range(3)]
    np.testing.assert_allclose(predicted[names], model.predict(data), rtol=1e-5)


def test_before_a_worker_starts_it_says_what_is_wrong(predict, rows, tmp_path):
    for fields, error, said in (
        ({"model": "models:/delays@nobody"}, JobError, "models:/delays@nobody does not exist in the registry"),
        ({"model": "models:/delays/7"}, JobError, "models:/delays/7 cannot be loaded"),
        ({"keep_cols": ["id"]}, DataError, "keep_cols names columns that the dataset does not have: id"),
        ({"model": str(tmp_path)}, JobError, "there is no MLflow model at"),
        ({"prediction_col": "y"}, InvalidArgumentError, 'the dataset has a column "y"'),
    ):
        with pytest.raises(error, match=said):
            predict(**fields)
    narrow = tmp_path / "narrow.parquet"
    pq.write_table(pq.read_table(rows, columns=["a", "b"]), narrow)
    with pytest.raises(DataError, match='"c"'):
        predict(dataset=DataConnector.from_parquet(narrow))
    other = tmp_path / "other.parquet"
    pq.write_table(pq.read_table(rows).set_column(3, "y", pa.array(["text"] * ROWS)), other)
    with pytest.raises(DataError, match='column "y"'):
        predict(dataset=DataConnector.from_parquet([rows, other]))
    assert sorted(os.listdir(tmp_path)) == ["narrow.parquet", "other.parquet"]


def test_a_worker_that_is_killed_half_way_costs_no_row_and_doubles_none(predict, rows, tmp_path, monkeypatch, capsys):
    """Any pyfunc model, with two values per row; at its second batch one worker is killed, once."""
    import mlflow

    from shoal.jobs.prediction import output_files

    class Deadly(mlflow.pyfunc.PythonModel):
        def __init__(self, flag: str) -> None:
            self.flag = flag

        def predict(self, context, model_input, params=None):
            import os
            import signal

            if len(model_input) == 1_000 and os.path.exists(f"{self.flag}.armed") and not os.path.exists(self.flag):
                with open(self.flag, "w"):
                    os.kill(os.getpid(), signal.SIGKILL)
            with open(f"{self.flag}.armed", "w"):
                return model_input[["a", "b"]].to_numpy()

    flag = tmp_path / "killed"
    frame = DataConnector.from_parquet(rows).to_pandas()
    signature = mlflow.models.infer_signature(frame[["a", "b"]], frame[["a", "b"]].to_numpy())
    mlflow.pyfunc.save_model(
        tmp_path / "deadly", python_model=Deadly(str(flag)), signature=signature, pip_requirements=[]
    )
    monkeypatch.setattr(output_files, "FILE_ROWS", 1_000)
    result = predict(model=str(tmp_path / "deadly"), keep_cols=[], run_config={"max_restarts": 1})

    assert flag.exists()
    assert result.restarts == 1
    assert "continuing from the files that are complete" in capsys.readouterr().out
    predicted = DataConnector.from_parquet(tmp_path / "out").to_pandas()
    np.testing.assert_array_equal(predicted[["prediction_0", "prediction_1"]], frame[["a", "b"]])
    assert len([name for name in os.listdir(tmp_path / "out") if name.startswith("part-")]) == 6
    assert not list(tmp_path.glob(".out*"))
