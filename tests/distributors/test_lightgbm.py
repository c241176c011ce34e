from __future__ import annotations

from pathlib import Path

import lightgbm
import numpy as np
import pytest

from shoal.data import ShardedDataConnector
from shoal.distributors.lightgbm import LightGBMEstimator, LightGBMScalingConfig
from shoal.errors import InvalidArgumentError
from tests.support.two_node_cluster import COLUMNS, TwoNodes
from tests.training.custom import softmax, squared_error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n_estimators": True}, "n_estimators"),
        ({"objective": "regression", "params": {"app": "binary"}}, "binary"),
        ({"params": {"num_trees": 7}}, "num_trees"),
        ({"objective": softmax, "params": {"app": "multiclass"}}, "objective is a function, but params contain app="),
        ({"params": {"device": "cpu"}, "scaling_config": LightGBMScalingConfig(use_gpu=True)}, "use_gpu"),
    ],
)
def test_contradictions_are_refused_when_it_is_made(arguments: dict, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        LightGBMEstimator(**arguments)


@pytest.mark.ray
def test_fit_predict_and_all_that_is_told(driver: TwoNodes, rows: Path) -> None:
    train, held_out = ShardedDataConnector.from_parquet(rows).random_split([0.8, 0.2])
    estimator = LightGBMEstimator(200, "l2", {"num_leaves": 15, "learning_rate": 0.5, "metric": "rmse"})
    booster = estimator.fit(train, COLUMNS, "y", held_out, early_stopping_rounds=5)
    assert isinstance(booster, lightgbm.Booster)
    assert booster is estimator.get_booster()
    assert booster.feature_name() == COLUMNS
    values = estimator.get_eval_results()["eval"]["rmse"]
    best = int(np.argmin(values))
    assert booster.best_iteration == best + 1 < len(values)
    predicted = estimator.predict(held_out)
    table = held_out.to_pandas()
    assert np.sqrt(np.mean((predicted - table["y"]) ** 2)) == pytest.approx(min(values), rel=1e-6)
    regressor = estimator.to_sklearn()
    assert isinstance(regressor, lightgbm.LGBMRegressor)
    np.testing.assert_array_equal(regressor.predict(table[COLUMNS]), predicted)
    assert regressor.get_params()["num_leaves"] == 15


@pytest.mark.ray
def test_classes_and_margins(driver: TwoNodes, rows: Path) -> None:
    connector = ShardedDataConnector.from_parquet(rows)
    table = connector.to_pandas()
    several = LightGBMEstimator(10, "multiclass", {"num_class": 3})
    several.fit(connector, COLUMNS, "k")
    classifier = several.to_sklearn()
    assert list(classifier.classes_) == [0, 1, 2]
    assert several.predict(connector).shape == (len(table), 3)
    assert np.mean(classifier.predict(table[COLUMNS]) == table["k"]) > 0.9
    margined = LightGBMEstimator(30, params={"learning_rate": 0.3})
    margined.fit(connector, COLUMNS, "y", base_margin_col="m")
    assert np.mean(np.abs(margined.predict(connector) - table["y"])) < 0.5


@pytest.mark.ray
def test_a_function_as_objective_predicts_raw_scores(driver: TwoNodes, rows: Path) -> None:
    connector = ShardedDataConnector.from_parquet(rows)
    table = connector.to_pandas()
    several = LightGBMEstimator(10, softmax, {"num_class": 3})
    several.fit(connector, COLUMNS, "k")
    scores = several.predict(connector)
    assert scores.shape == (len(table), 3)
    assert scores.min() < 0 and np.mean(scores.argmax(axis=1) == table["k"]) > 0.9
    regressor = several.to_sklearn()
    assert isinstance(regressor, lightgbm.LGBMRegressor)
    np.testing.assert_array_equal(regressor.predict(table[COLUMNS]), scores)
    margined = LightGBMEstimator(30, squared_error, {"learning_rate": 0.3})
    margined.fit(connector, COLUMNS, "y", base_margin_col="m")
    assert np.mean(np.abs(margined.predict(connector) - table["y"])) < 0.5


@pytest.mark.ray
def test_groups_are_ranked(driver: TwoNodes, rows: Path) -> None:
    frame = ShardedDataConnector.from_parquet(rows).to_pandas().assign(query=lambda rows: np.arange(len(rows)) // 20)
    estimator = LightGBMEstimator(10, "lambdarank")
    estimator.fit(frame, COLUMNS, "k", group_col="query")
    predicted = estimator.predict(frame)
    assert np.corrcoef(predicted, frame["k"])[0, 1] > 0.8
    ranker = estimator.to_sklearn()
    assert isinstance(ranker, lightgbm.LGBMRanker)
    np.testing.assert_array_equal(ranker.predict(frame[COLUMNS]), predicted)


@pytest.mark.ray
def test_two_classes(driver: TwoNodes, rows: Path) -> None:
    frame = ShardedDataConnector.from_parquet(rows).to_pandas().assign(positive=lambda rows: rows["y"] > 0)
    estimator = LightGBMEstimator(10, "binary")
    estimator.fit(frame, COLUMNS, "positive", base_margin_col="m")
    predicted = estimator.predict(frame)
    assert np.mean((predicted > 0.5) == frame["positive"]) > 0.9
    assert 0 < predicted.min() < predicted.max() <= 1
    assert list(estimator.to_sklearn().predict_proba(frame[COLUMNS]).shape) == [len(frame), 2]
