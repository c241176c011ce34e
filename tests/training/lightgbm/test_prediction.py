"""Predicting with margins, of which LightGBM's own `predict` knows nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest

from shoal.data import DataConnector
from shoal.training.lightgbm.prediction import predict_booster
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
    np.testing.assert_allclose(predict_booster(booster, connector, COLUMNS, base_margin_col="m"), expected, rtol=1e-6)
