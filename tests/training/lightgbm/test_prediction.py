"""Predicting with margins, of which LightGBM's own `predict` knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest

from shoal.data import DataConnector
from shoal.training.lightgbm.library import converted, objective_line
from tests.support.predictions import predict_booster
from tests.support.two_node_cluster import COLUMNS


@pytest.mark.parametrize(
    "params",
    [
        {"objective": "regression"},
        {"objective": "binary"},
        {"objective": "multiclass", "num_class": 3},
        {"objective": "multiclassova", "num_class": 3},
    ],
    ids=lambda params: params["objective"],
)
def test_what_the_link_makes_of_scores_is_what_lightgbm_makes_of_them(rows: Path, params: dict[str, Any]) -> None:
    connector = DataConnector.from_parquet(rows)
    table = connector.to_pandas()
    label = (
        table["y"] if params["objective"] == "regression" else np.minimum(table["k"], params.get("num_class", 2) - 1)
    )
    settings = {**params, "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(table[COLUMNS], label), 5)
    plain = predict_booster(booster, connector, COLUMNS)
    np.testing.assert_allclose(plain, booster.predict(table[COLUMNS]))
    raw = booster.predict(table[COLUMNS], raw_score=True)
    # The margin is 5 in every row.
    expected = {
        "regression": lambda: raw + 5,
        "binary": lambda: 1 / (1 + np.exp(-(raw + 5))),
        "multiclass": lambda: plain,
        "multiclassova": lambda: 1 / (1 + np.exp(-(raw + 5))),
    }[params["objective"]]()
    np.testing.assert_allclose(
        predict_booster(booster, connector, COLUMNS, base_margin_cols=["m"] * params.get("num_class", 1)),
        expected,
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    "params",
    [
        *({"objective": name} for name in ("regression", "regression_l1", "huber", "fair", "quantile", "mape")),
        *({"objective": name, "reg_sqrt": True} for name in ("regression", "regression_l1", "huber", "quantile")),
        *({"objective": name} for name in ("poisson", "gamma", "tweedie", "cross_entropy", "cross_entropy_lambda")),
        *({"objective": name} for name in ("lambdarank", "rank_xendcg")),
        {"objective": "binary", "sigmoid": 0.5},
        {"objective": "multiclass", "num_class": 3},
        {"objective": "multiclassova", "num_class": 3, "sigmoid": 2.0},
    ],
    ids=str,
)
def test_scores_are_converted_as_by_each_objective_of_lightgbm(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 2))
    label = 1 / (1 + np.exp(-features[:, 0]))
    if "num_class" in params or "rank" in params["objective"]:
        label = np.digitize(features[:, 0], [-0.5, 0.5])
    elif params["objective"] == "binary":
        label = features[:, 0] > 0
    group = [100, 100] if "rank" in params["objective"] else None
    settings = {**params, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 5}
    booster = lightgbm.train(settings, lightgbm.Dataset(features, label, group=group), 5)
    loaded = lightgbm.Booster(model_str=booster.model_to_string())
    for model in (booster, loaded):
        score = model.predict(features, raw_score=True)
        np.testing.assert_allclose(converted(score, objective_line(model)), model.predict(features), rtol=1e-12)
