from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xgboost

from shoal.data import DataConnector
from shoal.errors import DataError
from shoal.training.boosting.library import library_of
from tests.support.predictions import predict_booster
from tests.support.two_node_cluster import COLUMNS, ROWS


@pytest.fixture
def connector(rows: Path) -> DataConnector:
    return DataConnector.from_parquet(rows)


def trained(connector: DataConnector, label: str, rounds: int = 8, **params: object) -> xgboost.Booster:
    table = connector.to_pandas()
    return xgboost.train(params, xgboost.QuantileDMatrix(table[COLUMNS], table[label]), rounds)


def plain(booster: xgboost.Booster, connector: DataConnector, **kwargs: object) -> np.ndarray:
    return booster.predict(xgboost.DMatrix(connector.to_pandas()[COLUMNS]), **kwargs)


def test_every_row_in_order(connector: DataConnector) -> None:
    booster = trained(connector, "y")
    predicted = predict_booster(booster, connector, COLUMNS)
    assert predicted.shape == (ROWS,)
    assert predicted.dtype == np.float32
    np.testing.assert_allclose(predicted, plain(booster, connector), rtol=1e-6)


def test_a_column_per_class(connector: DataConnector) -> None:
    booster = trained(connector, "k", objective="multi:softprob", num_class=3)
    predicted = predict_booster(booster, connector, COLUMNS)
    assert predicted.shape == (ROWS, 3)
    np.testing.assert_allclose(predicted, plain(booster, connector), rtol=1e-5)


def test_the_best_round_is_what_predicts(connector: DataConnector) -> None:
    booster = trained(connector, "y")
    booster.set_attr(best_iteration="2")
    expected = plain(booster, connector, iteration_range=(0, 3))
    np.testing.assert_allclose(predict_booster(booster, connector, COLUMNS), expected, rtol=1e-6)


def test_margins(connector: DataConnector) -> None:
    booster = trained(connector, "y")
    without = plain(booster, connector, output_margin=True) - float(booster.get_dump is None)
    with_margin = predict_booster(booster, connector, COLUMNS, base_margin_cols=["m"])
    assert np.ptp((with_margin - without).round(3)) == 0
    assert not np.allclose(with_margin, without)


def test_a_missing_column(connector: DataConnector) -> None:
    with pytest.raises(DataError, match='"z"'):
        predict_booster(trained(connector, "y"), connector, ["a", "b", "z"])


@pytest.mark.parametrize(
    ("label", "params", "kind"),
    [
        ("y", {"objective": "reg:squarederror", "max_depth": 3}, xgboost.XGBRegressor),
        ("k", {"objective": "multi:softprob", "num_class": 3}, xgboost.XGBClassifier),
        ("k", {"objective": "multi:softmax", "num_class": 3}, xgboost.XGBClassifier),
    ],
)
def test_as_sklearn(connector: DataConnector, label: str, params: dict, kind: type) -> None:
    booster = trained(connector, label, **params)
    model = library_of("xgboost").as_sklearn(booster, params, 5, {})
    values = connector.to_pandas()[COLUMNS]
    assert type(model) is kind
    assert model.n_features_in_ == 3
    assert list(model.feature_names_in_) == COLUMNS
    if kind is xgboost.XGBClassifier:
        assert list(model.classes_) == [0, 1, 2]
        np.testing.assert_array_equal(np.unique(model.predict(values)), [0, 1, 2])
        if params["objective"] == "multi:softprob":
            np.testing.assert_allclose(model.predict_proba(values), plain(booster, connector), rtol=1e-5)
    else:
        np.testing.assert_allclose(model.predict(values), plain(booster, connector), rtol=1e-6)
        assert model.get_params()["max_depth"] == 3


def test_a_binary_classifier(connector: DataConnector) -> None:
    table = connector.to_pandas()
    booster = xgboost.train(
        {"objective": "binary:logistic"}, xgboost.DMatrix(table[COLUMNS], (table["y"] > 0).astype(int)), 8
    )
    model = library_of("xgboost").as_sklearn(booster, {"objective": "binary:logistic"}, 5, {})
    assert list(model.classes_) == [0, 1]
    probability = model.predict_proba(table[COLUMNS])
    np.testing.assert_allclose(probability[:, 1], plain(booster, connector), rtol=1e-6)
    assert model.score(table[COLUMNS], (table["y"] > 0).astype(int)) > 0.8
