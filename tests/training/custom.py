"""Objectives and metrics in either library's signature; workers import this by name."""

from __future__ import annotations

from typing import Any

import numpy as np


def squared_error(predictions: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of an ``xgboost.DMatrix`` and of a ``lightgbm.Dataset``; with weights, if there are any."""
    weight = rows.get_weight()
    weight = np.ones(len(predictions)) if weight is None or not len(weight) else weight
    return 2 * weight * (predictions - rows.get_label()), 2 * weight


def softmax(scores: np.ndarray, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of several classes, scores ``[rows, classes]``."""
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    truth = np.eye(scores.shape[1])[rows.get_label().astype(int)]
    return likely - truth, np.maximum(2 * likely * (1 - likely), 1e-6)


def mean_error(predictions: np.ndarray, matrix: Any) -> tuple[str, float]:
    """For XGBoost."""
    return "mean-error", float(np.mean(np.abs(predictions - matrix.get_label())))


def worst_error(predictions: np.ndarray, dataset: Any) -> list[tuple[str, float, bool]]:
    """For LightGBM; one that is no mean over rows, and one of which more is better."""
    error = np.abs(predictions - dataset.get_label())
    return [("worst", float(error.max()), False), ("hits", float(np.mean(error < 0.5)), True)]
