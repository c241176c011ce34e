"""Predictions of a booster of either library, as the estimators make them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.data import DataConnector


def predict_booster(booster: Any, connector: DataConnector, input_cols: Sequence[str], **options: Any) -> np.ndarray:
    library = importlib.import_module(f"shoal.training.{type(booster).__module__.split('.')[0]}.model")
    return library.predictor(booster, input_cols, **options).predict_dataset(connector)
