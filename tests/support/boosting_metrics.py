"""All metrics of both boosting libraries, each with an objective and rows that suit it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import xgboost

COLUMNS = ["a", "b", "c"]
QUERY_ROWS = 10
BOUNDS = {"label_lower_bound_col": "low", "label_upper_bound_col": "high"}


@dataclass(frozen=True)
class MetricCase:
    """A metric of a library.

    Args:
        framework: Name of the library.
        metric: The metric as a user writes it; "": the one of the objective.
        params: Objective and its parameters.
        label: Column of the labels.
        name: Name in the library's results; "": `metric`.
    """

    framework: str
    metric: str
    params: dict[str, Any] = field(default_factory=dict)
    label: str = "real"
    name: str = ""

    def __str__(self) -> str:
        return f"{self.framework}-{self.metric or self.evaluated}"

    @property
    def evaluated(self) -> str:
        return self.name or self.metric

    @property
    def group(self) -> bool:
        return self.label in ("grade", "relevant")

    @property
    def all_params(self) -> dict[str, Any]:
        key = "eval_metric" if self.framework == "xgboost" else "metric"
        return {**self.params, **({key: self.metric} if self.metric else {})}

    def values(self, train: pd.DataFrame, holdout: pd.DataFrame, rounds: int, **params: Any) -> list[float]:
        """Return the metric of the holdout after each round of the plain library."""
        return (_xgboost if self.framework == "xgboost" else _lightgbm)(self, train, holdout, rounds, params)


def _xgboost(
    case: MetricCase, train: pd.DataFrame, holdout: pd.DataFrame, rounds: int, params: dict[str, Any]
) -> list[float]:
    def matrix(rows: pd.DataFrame, ref: Any = None) -> xgboost.QuantileDMatrix:
        censored = {"label_lower_bound": rows.low, "label_upper_bound": rows.high}
        labels = censored if case.label == "low" else {"label": rows[case.label]}
        qid = {"qid": rows["query"]} if case.group else {}
        return xgboost.QuantileDMatrix(rows[COLUMNS], ref=ref, **labels, **qid)

    found: dict[str, Any] = {}
    data = matrix(train)
    fixed = {"nthread": 1, "seed": 0, "verbosity": 0}
    evals = [(matrix(holdout, data), "holdout")]
    xgboost.train(
        {**case.all_params, **fixed, **params}, data, rounds, evals=evals, evals_result=found, verbose_eval=False
    )
    return found["holdout"][case.evaluated]


def _lightgbm(
    case: MetricCase, train: pd.DataFrame, holdout: pd.DataFrame, rounds: int, params: dict[str, Any]
) -> list[float]:
    found: dict[str, Any] = {}
    fixed = {"deterministic": True, "force_col_wise": True, "num_threads": 1, "verbosity": -1, "seed": 0}
    given = {**case.all_params, **fixed, **params, "feature_pre_filter": False}
    sizes = [[QUERY_ROWS] * (len(rows) // QUERY_ROWS) if case.group else None for rows in (train, holdout)]
    data = lightgbm.Dataset(train[COLUMNS], train[case.label], group=sizes[0], params=given)
    valid = data.create_valid(holdout[COLUMNS], holdout[case.label], group=sizes[1])
    lightgbm.train(given, data, rounds, [valid], ["holdout"], callbacks=[lightgbm.record_evaluation(found)])
    return found["holdout"][case.evaluated]


def table(rows: int, seed: int) -> pd.DataFrame:
    """Return rows with a label of each kind, in queries of ten rows."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame(random.normal(size=(rows, 3)), columns=COLUMNS)
    real = frame.a * 2 + np.sin(frame.b * 3) + random.normal(scale=0.3, size=rows)
    frame["real"] = real + 5
    frame["positive"] = np.exp(real / 3)
    frame["share"] = 1 / (1 + np.exp(-real))
    frame["count"] = random.poisson(np.exp(real / 3))
    frame["binary"] = (real > 0).astype(int)
    frame["classes"] = np.digitize(real, [-1, 1])
    frame["grade"] = np.digitize(real, [0, 2])
    frame["relevant"] = frame["binary"]
    frame["low"], frame["high"] = np.exp(real), np.exp(real + 0.5)
    frame["query"] = np.arange(rows) // QUERY_ROWS
    return frame


def _cases(framework: str, params: dict[str, Any], label: str, *metrics: str) -> list[MetricCase]:
    """Return a case per metric, written "as the user writes it=as it is evaluated"."""
    pairs = [metric.partition("=") for metric in metrics]
    return [MetricCase(framework, given, params, label, name) for given, _, name in pairs]


_BINARY, _SOFT = {"objective": "binary:logistic"}, {"objective": "multi:softprob", "num_class": 3}
_AFT = {"objective": "survival:aft"}
_RANK = {"objective": "rank:ndcg", "lambdarank_pair_method": "topk", "ndcg_exp_gain": False}
_CLASSES = {"objective": "multiclass", "num_class": 3}

CASES = [
    *_cases("xgboost", {}, "positive", "=rmse", "rmse", "rmsle", "mae", "mape", "mphe", "gamma-deviance"),
    *_cases("xgboost", {"objective": "reg:quantileerror", "quantile_alpha": 0.3}, "real", "=quantile", "quantile"),
    *_cases("xgboost", _BINARY, "binary", "=logloss", "logloss", "error", "error@0.7", "auc", "aucpr", "ams@0.4"),
    *_cases("xgboost", _SOFT, "classes", "=mlogloss", "mlogloss", "merror", "auc"),
    *_cases("xgboost", {"objective": "count:poisson"}, "count", "=poisson-nloglik", "poisson-nloglik"),
    *_cases("xgboost", {"objective": "reg:gamma"}, "positive", "=gamma-deviance", "gamma-nloglik"),
    *_cases("xgboost", {"objective": "reg:tweedie"}, "positive", "=tweedie-nloglik@1.5", "tweedie-nloglik@1.3"),
    *_cases("xgboost", {"objective": "survival:cox"}, "positive", "=cox-nloglik", "cox-nloglik"),
    *_cases("xgboost", _AFT, "low", "=aft-nloglik", "aft-nloglik", "interval-regression-accuracy"),
    *_cases("xgboost", _RANK, "grade", "=ndcg@32", "ndcg", "ndcg@5", "ndcg@5-", "ndcg-"),
    *_cases("xgboost", {**_RANK, "objective": "rank:map"}, "relevant", "=map@32", "map", "map@3", "map-", "pre@2"),
    *_cases("lightgbm", {}, "positive", "=l2", "l1", "mae=l1", "mse=l2", "l2_root=rmse", "rmse", "mape", "r2"),
    *_cases("lightgbm", {}, "positive", "huber", "fair", "gamma_deviance"),
    *_cases("lightgbm", {"objective": "quantile", "alpha": 0.3}, "real", "=quantile", "quantile"),
    *_cases("lightgbm", {"objective": "poisson"}, "count", "=poisson", "poisson"),
    *_cases("lightgbm", {"objective": "gamma"}, "positive", "=gamma", "gamma"),
    *_cases("lightgbm", {"objective": "tweedie"}, "positive", "=tweedie", "tweedie"),
    *_cases("lightgbm", {"objective": "binary"}, "binary", "=binary_logloss", "binary_logloss", "binary_error", "auc"),
    *_cases("lightgbm", {"objective": "binary"}, "binary", "average_precision"),
    *_cases("lightgbm", {"objective": "cross_entropy"}, "share", "=cross_entropy", "xentropy=cross_entropy"),
    *_cases("lightgbm", {"objective": "cross_entropy"}, "share", "kldiv=kullback_leibler"),
    *_cases("lightgbm", {"objective": "cross_entropy_lambda"}, "share", "=cross_entropy_lambda"),
    *_cases("lightgbm", _CLASSES, "classes", "=multi_logloss", "multi_logloss", "multi_error", "auc_mu"),
    *_cases("lightgbm", {**_CLASSES, "multi_error_top_k": 2}, "classes", "multi_error=multi_error@2"),
    *_cases("lightgbm", {"objective": "lambdarank"}, "grade", "=ndcg@5"),
    *_cases("lightgbm", {"objective": "lambdarank", "eval_at": [3]}, "grade", "ndcg=ndcg@3", "map=map@3"),
    *_cases("lightgbm", {"objective": "lambdarank", "eval_at": [3]}, "grade", "mean_average_precision=map@3"),
]
