from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pytest

from shoal.data import ArrowIngester, DataConnector, RayDataIngester, ShardedDataConnector
from shoal.distributors import call
from shoal.distributors.xgboost import XGBEstimator, XGBScalingConfig
from shoal.errors import CapacityError, InvalidArgumentError
from shoal.jobs import JobSpec
from shoal.training.boosting import engine
from shoal.training.gang.placement import GangShape
from shoal.training.run_config import RunConfig
from tests.support.two_node_cluster import COLUMNS, TwoNodes, write_rows
from tests.training.custom import mean_error, squared_error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n_estimators": 0}, "n_estimators"),
        ({"n_estimators": 1.5}, "n_estimators"),
        ({"objective": "reg:squarederror", "params": {"objective": "binary:logistic"}}, "binary:logistic"),
        ({"params": {"n_estimators": 7}}, "n_estimators"),
        ({"max_depth": 4}, r"no argument max_depth: .* params={.max_depth.: 4}"),
        ({"params": {"device": "cpu"}, "scaling_config": XGBScalingConfig(use_gpu=True)}, "use_gpu"),
        ({"params": {"device": "cuda:0"}}, "cuda:0"),
        ({"params": {"max_depth": object()}}, "max_depth"),
        ({"objective": squared_error, "params": {"objective": "reg:squarederror"}}, "objective is a function"),
        ({"params": {"eval_metric": mean_error}}, "as objective or custom_metric"),
        ({"custom_metric": "rmse"}, "custom_metric must be a function"),
    ],
)
def test_contradictions_are_refused_when_it_is_made(arguments: dict, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        XGBEstimator(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"input_cols": "a"}, "input_cols"),
        ({"input_cols": []}, "input_cols"),
        ({"categorical_cols": "a"}, r"categorical_cols='a': must be a list such as \[\"a\", \"b\"\], not a text"),
        ({"early_stopping_rounds": 3}, "eval_set"),
        ({"early_stopping_rounds": 0, "eval_set": True}, "early_stopping_rounds"),
        ({"verbose_eval": -1}, "verbose_eval"),
        ({"dataset": "rows.parquet"}, "from_parquet"),
        ({"eval_set": {"eval": 3}}, "eval_set"),
        ({"label_col": 3}, "label_col"),
    ],
)
def test_wrong_arguments_of_fit(rows: Path, arguments: dict, named: str) -> None:
    connector = DataConnector.from_parquet(rows)
    if arguments.get("eval_set") is True:
        arguments = {**arguments, "eval_set": connector}
    with pytest.raises(InvalidArgumentError, match=named):
        XGBEstimator().fit(**{"dataset": connector, "input_cols": COLUMNS, "label_col": "y", **arguments})


def test_before_fit_there_is_nothing_to_get() -> None:
    estimator = XGBEstimator()
    for ask in (
        estimator.get_booster,
        estimator.get_eval_results,
        estimator.to_sklearn,
        lambda: estimator.predict(None),
    ):
        with pytest.raises(InvalidArgumentError, match="fit"):
            ask()


def test_outside_of_ray_it_runs_elsewhere(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[JobSpec] = []

    def elsewhere(spec: JobSpec, *_: object, **__: object) -> NoReturn:
        asked.append(spec)
        raise InvalidArgumentError("stopped here")

    monkeypatch.setattr(call, "is_connected", lambda: False)
    monkeypatch.setattr(call, "pool_for_job", elsewhere)
    estimator = XGBEstimator(
        7, "reg:squarederror", {"max_depth": np.int64(3)}, run_config=RunConfig(pool_name="p", seed=5)
    )
    with pytest.raises(InvalidArgumentError, match="stopped here"):
        estimator.fit(DataConnector.from_parquet(rows), COLUMNS, "y", {"eval": DataConnector.from_parquet(rows)})
    request = JobSpec.model_validate_json(asked[0].model_dump_json(by_alias=True))
    assert request.params == {"objective": "reg:squarederror", "max_depth": 3}
    assert (request.n_estimators, request.run_config.pool_name, request.run_config.seed) == (7, "p", 5)
    assert list(request.eval_set) == ["eval"]


@pytest.mark.ray
def test_fit_predict_and_all_that_is_told(driver: TwoNodes, rows: Path, capsys: pytest.CaptureFixture) -> None:
    import xgboost

    train, held_out = ShardedDataConnector.from_parquet(rows).random_split([0.8, 0.2])
    estimator = XGBEstimator(20, params={"max_depth": 4})
    booster = estimator.fit(train, COLUMNS, "y", held_out, True, early_stopping_rounds=5)
    assert isinstance(booster, xgboost.Booster)
    assert booster is estimator.get_booster()
    assert booster.feature_names == COLUMNS
    results = estimator.get_eval_results()
    assert list(results) == ["eval"]
    assert len(results["eval"]["rmse"]) == 20
    assert "[19]\teval-rmse:" in capsys.readouterr().out
    predicted = estimator.predict(held_out)
    table = held_out.to_pandas()
    assert np.sqrt(np.mean((predicted - table["y"]) ** 2)) == pytest.approx(min(results["eval"]["rmse"]), rel=1e-3)
    regressor = estimator.to_sklearn()
    np.testing.assert_allclose(regressor.predict(table[COLUMNS]), predicted, rtol=1e-5)
    assert regressor.get_params()["max_depth"] == 4


@pytest.mark.ray
def test_a_frame_is_staged_for_the_training_alone(
    driver: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(500, 2)), columns=["x", "z"])
    frame["y"] = (frame["x"] > 0).astype(bool)
    estimator = XGBEstimator(5, "binary:logistic")
    estimator.fit(frame, ["x", "z"], "y", {"train": frame, "more": frame[:3]})
    assert estimator.predict(frame).shape == (500,)
    assert list(estimator.to_sklearn().classes_) == [0, 1]
    assert not [path for path in (tmp_path / "staging").rglob("*") if path.is_file()]


@pytest.mark.ray
def test_a_frames_categories(driver: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"k": pd.Categorical(rng.choice(["c", "a", "b"], 600)), "x": rng.random(600)})
    frame["y"] = (frame["k"] == "a") * 2 + frame["x"]
    estimator = XGBEstimator(20)
    estimator.fit(frame, ["k", "x"], "y", categorical_cols=["k"])
    predicted = estimator.predict(frame)
    assert np.abs(predicted - frame["y"]).mean() < 0.1
    # The same values, in another frame's order of them, and one that was not there.
    other = frame.assign(k=pd.Categorical(frame["k"], ["z", "b", "c", "a"]))
    np.testing.assert_array_equal(estimator.predict(other), predicted)
    missing, unseen = (frame.assign(k=pd.Series([value] * 600, dtype="str")) for value in (None, "z"))
    np.testing.assert_array_equal(estimator.predict(missing), estimator.predict(unseen))
    # In the order of the model's own categories, XGBoost's own estimator takes a frame as it is.
    np.testing.assert_allclose(estimator.to_sklearn().predict(frame[["k", "x"]]), predicted, rtol=1e-5)


@pytest.mark.ray
def test_callbacks_run_in_the_workers(driver: TwoNodes, rows: Path) -> None:
    import xgboost

    class StopAfter(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            return epoch == 2

    estimator = XGBEstimator(50, callbacks=[StopAfter()])
    assert estimator.fit(DataConnector.from_parquet(rows), COLUMNS, "y").num_boosted_rounds() == 3


@pytest.mark.ray
def test_a_function_as_objective_predicts_raw_scores(driver: TwoNodes, rows: Path) -> None:
    connector = DataConnector.from_parquet(rows)
    estimator = XGBEstimator(10, squared_error, {"max_depth": 3}, custom_metric=mean_error)
    estimator.fit(connector, COLUMNS, "y", {"train": connector})
    table = connector.to_pandas()
    predicted = estimator.predict(connector)
    results = estimator.get_eval_results()["train"]
    assert list(results) == ["rmse", "mean-error"]
    assert results["mean-error"][-1] == pytest.approx(np.mean(np.abs(predicted - table["y"])), rel=1e-5)
    np.testing.assert_allclose(estimator.to_sklearn().predict(table[COLUMNS]), predicted, rtol=1e-5)


@pytest.mark.ray
def test_more_than_is_active_is_refused(driver: TwoNodes, rows: Path) -> None:
    with pytest.raises(CapacityError, match="scale_cluster"):
        XGBEstimator(scaling_config=XGBScalingConfig(num_workers=5)).fit(DataConnector.from_parquet(rows), COLUMNS, "y")


@pytest.mark.ray
def test_a_fit_that_fails_keeps_no_model_of_the_one_before(driver: TwoNodes, rows: Path) -> None:
    estimator = XGBEstimator(3)
    connector = DataConnector.from_parquet(rows)
    estimator.fit(connector, COLUMNS, "y")
    with pytest.raises(ValueError, match="zz"):
        estimator.fit(connector, ["zz"], "y")
    with pytest.raises(InvalidArgumentError, match="fit"):
        estimator.get_booster()


class Asked(Exception):
    """Tells the size of the workers that a training asks for."""


@pytest.mark.ray
def test_workers_leave_ray_data_half_of_their_cpus(
    driver: TwoNodes, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(shape: GangShape, **_: Any) -> None:
        raise Asked(str(shape))

    monkeypatch.setattr(engine, "shared_gang", asked)
    for ingestor, size in ((RayDataIngester, "2 workers of 0.5 CPUs"), (ArrowIngester, "2 workers of 1 CPU")):
        with pytest.raises(Asked, match=f"^{size}$"):
            XGBEstimator().fit(DataConnector.from_parquet(rows, ingestor_class=ingestor), COLUMNS, "y")
    evaluated = {"eval": DataConnector.from_parquet(rows, ingestor_class=RayDataIngester)}
    with pytest.raises(Asked, match=r"^2 workers of 0\.5 CPUs$"):
        XGBEstimator().fit(DataConnector.from_parquet(rows), COLUMNS, "y", eval_set=evaluated)


@pytest.mark.ray
@pytest.mark.long
def test_ray_data_reads_beside_the_workers_to_the_same_model(driver: TwoNodes, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", rows=2_000, files=1)  # each file more takes Ray Data seconds
    alone = XGBEstimator(5, params={"max_depth": 3}, scaling_config=XGBScalingConfig(num_workers=1))
    alone.fit(DataConnector.from_parquet(rows), COLUMNS, "y")
    beside = XGBEstimator(5, params={"max_depth": 3}, scaling_config=XGBScalingConfig(num_workers=1))
    beside.fit(DataConnector.from_parquet(rows, ingestor_class=RayDataIngester), COLUMNS, "y")
    assert beside.get_result().rows == 2_000
    assert beside.get_result().model == alone.get_result().model
