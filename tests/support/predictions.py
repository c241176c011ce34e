"""Predictions of a booster of either library, as the estimators make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.data import DataConnector
from shoal.training.boosting.library import owner_of


def predict_booster(booster: Any, connector: DataConnector, input_cols: Sequence[str], **options: Any) -> np.ndarray:
    library = owner_of(booster)
    assert library is not None
    return library.predictor(booster, input_cols, **options).predict_dataset(connector)
