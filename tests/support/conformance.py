"""Trainings of shoal beside the same trainings of the plain libraries in one process, on data in many shapes.

``python -m tests.support.conformance`` prints the differences of all cases.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.training.boosting.engine import train
from shoal.training.boosting.library import library_of
from shoal.training.boosting.request import TrainRequest, TrainResult
from shoal.training.gang.gang import end_gangs
from tests.support.without_ray import nodes_without_ray

ROWS, EVAL_ROWS, ROUNDS = 3_000, 800, 25
FEATURES = ("a", "b", "c", "d", "e")

NOISE = 2e-4
"""Largest difference that the order of additions explains, relative to the spread of the values."""


@dataclass(frozen=True)
class Case:
    """One set of parameters.

    Args:
        name: Name of the case.
        framework: Library.
        params: The library's parameters, with the objective.
        label: Kind of the labels: a key of :data:`LABELS`.
        bound: Largest accepted difference of predictions and metrics, relative to the spread of the plain ones. A bound
            above :data:`NOISE` has a reason.
        reason: Why several workers differ from one process.
        quality: Whether only the metrics of the last round are compared, because the trees differ for a good reason.
        columns: Further fields of the request, such as `weight_col`.
        stop: Rounds without improvement after which the training stops.
    """

    name: str
    framework: str
    params: Mapping[str, Any]
    label: str = "number"
    bound: float = NOISE
    reason: str = ""
    quality: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    stop: int | None = None

    def __str__(self) -> str:
        return f"{self.framework} {self.name}"


@dataclass(frozen=True)
class Shape:
    """Order and row groups of the training set.

    Args:
        order: "time", "label", "group" or "shuffled".
        row_groups: Number of row groups of the file.
    """

    order: str
    row_groups: int

    def __str__(self) -> str:
        return f"by {self.order} in {self.row_groups} row groups"


SHAPES = (
    Shape("time", 1),
    Shape("label", 3),
    Shape("shuffled", 40),
    Shape("time", 40),
    Shape("label", 1),
    Shape("shuffled", 1),
)
"""Each case takes the next two of these shapes, so that all of them meet all kinds of cases."""

LABELS: Mapping[str, Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]] = {
    "number": lambda score, time, draw: score + 3 * time + draw.normal(0, 1, len(score)),
    "positive": lambda score, time, draw: draw.gamma(2.0, np.exp(score / 6 + time) / 2) + 0.01,
    "count": lambda score, time, draw: draw.poisson(np.exp(score / 6 + time)),
    "share": lambda score, time, draw: 1 / (1 + np.exp(-(score + time + draw.normal(0, 1, len(score))))),
    "class": lambda score, time, draw: draw.random(len(score)) < 1 / (1 + np.exp(-(score + time))),
    "rare": lambda score, time, draw: draw.random(len(score)) < 1 / (1 + np.exp(-(score - 3 + time))),
    "classes": lambda score, time, draw: np.digitize(score + time + draw.normal(0, 1, len(score)), [-1, 1.5]),
    "grade": lambda score, time, draw: np.digitize(score + draw.normal(0, 1, len(score)), [-1, 0.5, 2]),
    "far": lambda score, time, draw: 1e6 + 100 * score + draw.normal(0, 30, len(score)),
}
"""Kind of the labels -> function of the score of the features, the time from 0 to 1, and random numbers."""


@functools.cache
def frame(label: str, rows: int, seed: int) -> pd.DataFrame:
    """Return rows in the order of time, with columns of all roles."""
    draw = np.random.default_rng([seed, rows])
    table = pd.DataFrame({name: draw.integers(0, 30, rows) for name in FEATURES})
    table["c"] = table["c"].astype(float).where(draw.random(rows) > 0.1)
    table["k"] = draw.choice(["north", "south", "west", "Ömer"], rows)
    time = np.arange(rows) / rows
    score = (
        table.a / 10 - (table.b > 15) * 2 + table.c.fillna(40) / 20 + table.k.map({"north": 1, "west": -1}).fillna(0)
    )
    table["y"] = LABELS[label]((score - score.mean()).to_numpy(), time, draw).astype(float)
    table["w"] = draw.integers(1, 4, rows).astype(float)
    table["m"] = draw.integers(-2, 3, rows) / 4
    table["q"] = np.arange(rows) // 20
    table["when"] = 1_756_000_000 + np.arange(rows) * 60
    return table


@dataclass(frozen=True)
class Outcome:
    """Predictions of the eval set, metrics per round, and best round of one training."""

    predictions: np.ndarray
    history: dict[str, list[float]]
    best: int | None


@functools.cache
def _plain(index: int) -> Outcome:
    case = CASES[index]
    return _plain_xgboost(case) if case.framework == "xgboost" else _plain_lightgbm(case)


def plain(case: Case) -> Outcome:
    """Train with the library itself, in this process."""
    return _plain(CASES.index(case))


def _roles(case: Case) -> tuple[list[str], list[str]]:
    categorical = list(case.columns.get("categorical_cols", ()))
    return [*case.columns.get("input_cols", FEATURES), *categorical], categorical


def _features(table: pd.DataFrame, case: Case) -> pd.DataFrame:
    names, categorical = _roles(case)
    chosen = table[names].copy()
    for name in categorical:
        chosen[name] = chosen[name].astype(pd.CategoricalDtype(sorted(table[name].unique())))
    return chosen


def _plain_xgboost(case: Case) -> Outcome:
    import xgboost

    def matrix(table: pd.DataFrame, ref: Any = None) -> Any:
        columns = case.columns
        features = _features(table, case)
        for name in _roles(case)[1]:  # XGBoost's own store of categories cuts names that are not ASCII
            features[name] = features[name].cat.rename_categories(range(len(features[name].cat.categories)))
        return xgboost.QuantileDMatrix(
            features,
            label=table.y,
            weight=table.w if "weight_col" in columns else None,
            base_margin=table.m if "base_margin_col" in columns else None,
            qid=table.q if "group_col" in columns else None,
            enable_categorical=True,
            max_bin=case.params.get("max_bin", 256),
            ref=ref,
        )

    train_set = matrix(frame(case.label, ROWS, 1))
    eval_set = matrix(frame(case.label, EVAL_ROWS, 2), train_set)
    history: dict[str, Any] = {}
    booster = xgboost.train(
        {**case.params, "nthread": 1, "seed": 0},
        train_set,
        ROUNDS,
        evals=[(eval_set, "eval")],
        early_stopping_rounds=case.stop,
        evals_result=history,
        verbose_eval=False,
    )
    best = booster.best_iteration if case.stop else None
    rounds = (0, 0) if best is None else (0, best + 1)
    return Outcome(booster.predict(eval_set, iteration_range=rounds), history["eval"], best)


def _plain_lightgbm(case: Case) -> Outcome:
    import lightgbm

    def dataset(table: pd.DataFrame, reference: Any = None) -> Any:
        columns = case.columns
        return lightgbm.Dataset(
            _features(table, case),
            label=table.y,
            weight=table.w if "weight_col" in columns else None,
            init_score=table.m if "base_margin_col" in columns else None,
            group=table.groupby("q").size() if "group_col" in columns else None,
            reference=reference,
            params={"feature_pre_filter": False, "verbosity": -1},
        )

    train_set = dataset(frame(case.label, ROWS, 1))
    eval_set = dataset(frame(case.label, EVAL_ROWS, 2), train_set)
    history: dict[str, Any] = {}
    calls: list[Any] = [lightgbm.record_evaluation(history)]
    if case.stop:
        calls.append(lightgbm.early_stopping(case.stop, verbose=False))
    fixed = {"verbosity": -1, "num_threads": 1, "deterministic": True, "force_col_wise": True, "seed": 0}
    booster = lightgbm.train({**fixed, **case.params}, train_set, ROUNDS, [eval_set], ["eval"], callbacks=calls)
    features = _features(frame(case.label, EVAL_ROWS, 2), case)
    # With margins, the raw scores are compared: the library's own `predict` knows no margins.
    predictions = booster.predict(features, raw_score="base_margin_col" in case.columns)
    return Outcome(predictions, history["eval"], booster.best_iteration - 1 if case.stop else None)


class Files:
    """Parquet files of the frames, in all shapes, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, case: Case, shape: Shape) -> Path:
        table = frame(case.label, ROWS, 1)
        by = {"label": ["y"], "group": ["q"]}.get(shape.order)
        if "group_col" not in case.columns:  # the rows of a group stay together, and the groups in the order of time
            if by:
                table = table.sort_values(by, kind="stable")
            elif shape.order == "shuffled":
                table = table.sample(frac=1, random_state=3)
        return self._written(
            table, f"{case.label}-{shape.order}-{shape.row_groups}-{'group_col' in case.columns}", shape
        )

    def eval(self, case: Case) -> Path:
        # Sorted by label: the order that is hardest on metrics that are computed in parts.
        table = frame(case.label, EVAL_ROWS, 2)
        grouped = "group_col" in case.columns
        return self._written(
            table if grouped else table.sort_values("y", kind="stable"), f"{case.label}-eval-{grouped}"
        )

    def _written(self, table: pd.DataFrame, name: str, shape: Shape | None = None) -> Path:
        path = self.folder / f"{name}.parquet"
        if not path.exists():
            groups = 1 if shape is None else shape.row_groups
            pq.write_table(
                pa.Table.from_pandas(table, preserve_index=False), path, row_group_size=-(-len(table) // groups)
            )
        return path


def with_shoal(case: Case, shape: Shape, workers: int, files: Files) -> Outcome:
    """Train with shoal on some workers, on a training set of a shape."""
    names, _ = _roles(case)
    rest = {name: value for name, value in case.columns.items() if name != "input_cols"}
    result: TrainResult = train(
        TrainRequest(
            framework=case.framework,
            dataset={"format": "parquet", "paths": [str(files.train(case, shape))]},
            eval_set={"eval": {"format": "parquet", "paths": [str(files.eval(case))]}},
            input_cols=names,
            label_col="y",
            params=dict(case.params),
            n_estimators=ROUNDS,
            early_stopping_rounds=case.stop,
            scaling_config={"num_workers": workers, "num_cpu_per_worker": 1, "use_gpu": False},
            **rest,
        )
    )
    booster = result.booster()
    margin = case.columns.get("base_margin_col")
    predictor = library_of(case.framework).predictor(
        booster, names, base_margin_cols=[margin] if margin and case.framework == "xgboost" else []
    )
    table = pa.Table.from_pandas(frame(case.label, EVAL_ROWS, 2), preserve_index=False)
    if margin and case.framework == "lightgbm":
        predictions = booster.predict(_features(frame(case.label, EVAL_ROWS, 2), case), raw_score=True)
    else:
        predictions = predictor.predict_table(table)
    return Outcome(predictions, result.eval_results["eval"], result.best_iteration if case.stop else None)


@dataclass(frozen=True)
class Difference:
    """How far a training is from the plain library's.

    Args:
        predictions: Largest difference of two predictions, as a fraction of the spread of the plain ones.
        metrics: Largest difference of a metric in any round, relative to the metric's largest value.
        last: Difference of the metrics of the last round alone.
        rounds: Difference of the best rounds.
    """

    predictions: float
    metrics: float
    last: float
    rounds: int

    def problems(self, case: Case) -> list[str]:
        """Return what is more than the case's bound."""
        found = []
        if case.quality:
            return [f"metric of the last round {self.last:.2g}"] if not self.last <= case.bound else []
        if not self.predictions <= case.bound:
            found.append(f"predictions {self.predictions:.2g}")
        if not self.metrics <= case.bound:
            found.append(f"metrics {self.metrics:.2g}")
        if self.rounds and case.bound <= NOISE:
            found.append(f"best round {self.rounds:+}")
        return found


def difference(mine: Outcome, theirs: Outcome) -> Difference:
    """Compare a training of shoal with the plain one."""
    assert set(mine.history) == set(theirs.history), (list(mine.history), list(theirs.history))
    spread = float(np.ptp(theirs.predictions)) or 1.0
    pairs = [(mine.history[name], values) for name, values in theirs.history.items()]

    def relative(ours: float, right: float, values: list[float]) -> float:
        return 0.0 if ours == right else abs(ours - right) / (max(map(abs, values)) or 1.0)

    each = [
        relative(ours, right, values)
        for own, values in pairs
        for ours, right in itertools.zip_longest(own, values, fillvalue=math.nan)
    ]
    return Difference(
        float(np.abs(np.asarray(mine.predictions) - theirs.predictions).max()) / spread,
        max(each, key=lambda value: math.inf if math.isnan(value) else value),
        max(relative(own[-1], values[-1], values) for own, values in pairs),
        (mine.best or 0) - (theirs.best or 0),
    )


_FIELDS = ("bound", "reason", "quality", "columns", "stop")


def _case(framework: str, name: str, label: str, params: dict[str, Any]) -> Case:
    """Return a case; `params` also contain the case's own fields."""
    fields = {each: params.pop(each) for each in _FIELDS if each in params}
    return Case(name, framework, params, label, **fields)


def _xgb(name: str, objective: str, label: str = "number", **more: Any) -> Case:
    return _case("xgboost", name, label, {"objective": objective, "max_depth": 4, "eta": 0.3, **more})


def _lgb(name: str, objective: str, label: str = "number", **more: Any) -> Case:
    params = {"objective": objective, "num_leaves": 12, "learning_rate": 0.2, **_LEAVES, **more}
    return _case("lightgbm", name, label, params)


_QUANTILES = (
    "Each worker sets the leaves to the quantile of its own rows, and the library takes the mean of the workers."
)
_FLOAT32 = "XGBoost computes labels and predictions in float32, so that labels around a million lose digits."
_SAMPLED = "Each worker samples its own rows."
_COUNTS = "Several workers estimate the rows of a leaf from the Hessians, so that `min_data_in_leaf` acts differently."
_SKIPPED = (
    "In one process, LightGBM tries no feature below a node at which the feature had no good split; several workers do."
)
# Limits of the leaves that act in the same way in one process and in several workers (see `_COUNTS`).
_LEAVES = {"min_data_in_leaf": 1, "min_sum_hessian_in_leaf": 5}
_DEFAULT_LEAVES = {"min_data_in_leaf": 20, "min_sum_hessian_in_leaf": 1e-3}
_WEIGHT, _MARGIN, _GROUP = {"weight_col": "w"}, {"base_margin_col": "m"}, {"group_col": "q"}
_CATEGORICAL = {"categorical_cols": ("k",)}

CASES: tuple[Case, ...] = (
    _xgb("squared error", "reg:squarederror", eval_metric=["rmse", "mae", "mape"]),
    _xgb("squared log error", "reg:squaredlogerror", "positive", eval_metric="rmsle"),
    _xgb("large labels", "reg:squarederror", "far", bound=0.15, reason=_FLOAT32),
    _xgb("pseudo-Huber", "reg:pseudohubererror"),
    _xgb("logistic regression", "reg:logistic", "share"),
    _xgb("poisson", "count:poisson", "count"),
    _xgb("gamma", "reg:gamma", "positive", eval_metric=["gamma-nloglik", "gamma-deviance"]),
    _xgb("tweedie", "reg:tweedie", "count", tweedie_variance_power=1.3),
    _xgb("absolute error", "reg:absoluteerror", quality=True, bound=0.03, reason=_QUANTILES),
    _xgb("quantile 0.9", "reg:quantileerror", quantile_alpha=0.9, quality=True, bound=0.03, reason=_QUANTILES),
    _xgb("two quantiles", "reg:quantileerror", quantile_alpha=[0.1, 0.5], quality=True, bound=0.03, reason=_QUANTILES),
    _xgb("binary", "binary:logistic", "class", eval_metric=["logloss", "error", "error@0.7", "auc", "aucpr"]),
    _xgb("raw scores", "binary:logitraw", "class"),
    _xgb("hinge", "binary:hinge", "class"),
    _xgb("rare class, stops by aucpr", "binary:logistic", "rare", eval_metric="aucpr", eta=0.6, stop=4),
    _xgb("rare class, stops by auc", "binary:logistic", "rare", eval_metric=["logloss", "auc"], eta=0.6, stop=4),
    _xgb("stops by logloss", "binary:logistic", "class", eta=0.9, stop=3),
    _xgb("scale_pos_weight", "binary:logistic", "rare", scale_pos_weight=5),
    _xgb("max_delta_step", "binary:logistic", "rare", max_delta_step=1),
    _xgb("softprob", "multi:softprob", "classes", num_class=3, eval_metric=["mlogloss", "merror", "auc"]),
    _xgb("softmax", "multi:softmax", "classes", num_class=3),
    _xgb("weights", "reg:squarederror", columns=_WEIGHT, eval_metric=["rmse", "mae"]),
    _xgb("weights and auc", "binary:logistic", "class", columns=_WEIGHT, eval_metric=["auc", "aucpr", "logloss"]),
    _xgb("margins", "reg:squarederror", columns=_MARGIN),
    _xgb("margins, binary", "binary:logistic", "class", columns=_MARGIN),
    _xgb("categories", "reg:squarederror", columns=_CATEGORICAL),
    _xgb("categories, one-hot", "reg:squarederror", columns=_CATEGORICAL, max_cat_to_onehot=1),
    _xgb("deep", "reg:squarederror", max_depth=9),
    _xgb("lossguide", "reg:squarederror", grow_policy="lossguide", max_leaves=20, max_depth=0),
    _xgb("few bins", "reg:squarederror", max_bin=8, bound=0.1, reason="The bins come from merged sketches."),
    _xgb("regularised", "reg:squarederror", reg_alpha=3, reg_lambda=10, gamma=5, min_child_weight=20),
    _xgb("monotone", "reg:squarederror", monotone_constraints={"a": 1, "b": -1}),
    _xgb("interactions", "reg:squarederror", interaction_constraints=[["a", "b"], ["c", "d", "e"]]),
    _xgb("base_score", "reg:squarederror", base_score=2.5),
    _xgb("dart", "reg:squarederror", booster="dart", rate_drop=0.0),
    _xgb("forest", "reg:squarederror", num_parallel_tree=3),
    _xgb("column sampling", "reg:squarederror", colsample_bynode=0.6, quality=True, bound=0.1),
    _xgb("row sampling", "reg:squarederror", subsample=0.6, quality=True, bound=0.1, reason=_SAMPLED),
    _xgb(
        "ndcg",
        "rank:ndcg",
        "grade",
        columns=_GROUP,
        eval_metric=["ndcg@5", "ndcg"],
        lambdarank_pair_method="topk",
    ),
    _xgb("pairwise", "rank:pairwise", "grade", columns=_GROUP, lambdarank_pair_method="topk", eval_metric="ndcg"),
    _xgb(
        "map", "rank:map", "class", columns=_GROUP, lambdarank_pair_method="topk", eval_metric=["map@3", "pre@2", "auc"]
    ),
    _xgb("regression by group", "reg:squarederror", "grade", columns=_GROUP),
    _lgb("squared error", "regression", metric=["rmse", "l1", "mape"]),
    _lgb("large labels", "regression", "far"),
    _lgb("time stamps", "regression", columns={"input_cols": ("a", "when")}),
    _lgb("square root", "regression", "positive", reg_sqrt=True),
    _lgb("huber", "huber"),
    _lgb("fair", "fair"),
    _lgb("poisson", "poisson", "count", **_DEFAULT_LEAVES, bound=0.3, reason=_COUNTS),
    _lgb("gamma", "gamma", "positive", metric=["gamma", "gamma_deviance"]),
    _lgb("tweedie", "tweedie", "count"),
    _lgb("absolute error", "regression_l1", quality=True, bound=0.03, reason=_QUANTILES),
    _lgb("quantile 0.9", "quantile", alpha=0.9, quality=True, bound=0.03, reason=_QUANTILES),
    _lgb("mape", "mape", "positive", quality=True, bound=0.03, reason=_QUANTILES),
    _lgb("binary", "binary", "class", metric=["binary_logloss", "binary_error", "auc", "average_precision"]),
    _lgb("rare class, stops by auc", "binary", "rare", metric="auc", learning_rate=0.6, stop=4),
    _lgb(
        "rare class, stops by average precision",
        "binary",
        "rare",
        metric="average_precision",
        learning_rate=0.6,
        stop=4,
    ),
    _lgb("stops by logloss", "binary", "class", learning_rate=0.9, stop=3),
    _lgb("unbalanced", "binary", "rare", is_unbalance=True),
    _lgb("scale_pos_weight", "binary", "rare", scale_pos_weight=5),
    _lgb("multiclass", "multiclass", "classes", num_class=3, metric=["multi_logloss", "multi_error", "auc_mu"]),
    _lgb("one against all", "multiclassova", "classes", num_class=3),
    _lgb("cross entropy", "cross_entropy", "share"),
    _lgb("cross entropy lambda", "cross_entropy_lambda", "share"),
    _lgb(
        "weights", "regression", columns=_WEIGHT, metric=["rmse", "l1"], **_DEFAULT_LEAVES, bound=0.15, reason=_COUNTS
    ),
    _lgb("rows of a leaf", "regression", metric=["rmse", "l1"], **_DEFAULT_LEAVES),
    _lgb("rows of a leaf, binary", "binary", "class", **_DEFAULT_LEAVES, bound=0.35, reason=_COUNTS),
    _lgb(
        "rows of a leaf, multiclass",
        "multiclass",
        "classes",
        num_class=3,
        **_DEFAULT_LEAVES,
        bound=0.35,
        reason=_COUNTS,
    ),
    _lgb(
        "rows of a leaf, lambdarank",
        "lambdarank",
        "grade",
        columns=_GROUP,
        **_DEFAULT_LEAVES,
        bound=0.2,
        reason=_COUNTS,
    ),
    _lgb("weights and auc", "binary", "class", columns=_WEIGHT, metric=["auc", "binary_logloss"]),
    _lgb("margins", "regression", columns=_MARGIN),
    _lgb("margins, binary", "binary", "class", columns=_MARGIN),
    _lgb("categories", "regression", columns=_CATEGORICAL),
    _lgb("many leaves", "regression", num_leaves=60),
    _lgb("shallow", "regression", max_depth=3),
    _lgb("few bins", "regression", max_bin=8),
    _lgb("regularised", "regression", lambda_l1=3, lambda_l2=10, min_gain_to_split=5, bound=0.15, reason=_SKIPPED),
    _lgb("smoothed", "regression", path_smooth=10),
    _lgb("monotone", "regression", monotone_constraints=[1, -1, 0, 0, 0]),
    _lgb("without average", "regression", boost_from_average=False),
    _lgb("zeros as missing", "regression", zero_as_missing=True),
    _lgb("extra trees", "regression", extra_trees=True, quality=True, bound=0.1),
    _lgb("feature sampling", "regression", feature_fraction=0.6, quality=True, bound=0.1),
    _lgb("row sampling", "regression", bagging_fraction=0.6, bagging_freq=1, quality=True, bound=0.1, reason=_SAMPLED),
    _lgb(
        "forest",
        "regression",
        boosting="rf",
        bagging_fraction=0.6,
        bagging_freq=1,
        quality=True,
        bound=0.1,
        reason=_SAMPLED,
    ),
    _lgb("goss", "regression", data_sample_strategy="goss", quality=True, bound=0.1, reason=_SAMPLED),
    _lgb("lambdarank", "lambdarank", "grade", columns=_GROUP, metric=["ndcg", "map"], eval_at=[3, 5]),
    _lgb("regression by group", "regression", "grade", columns=_GROUP),
)

WORKERS = (1, 2, 3)


def shapes(case: Case) -> tuple[Shape, ...]:
    """Return the two shapes of the training set in which a case is tried."""
    at = 2 * CASES.index(case)
    return SHAPES[at % len(SHAPES)], SHAPES[(at + 1) % len(SHAPES)]


def compared(case: Case, shape: Shape, workers: int, folder: Path) -> Difference:
    """Train a case with shoal and with the plain library, and compare the two."""
    return difference(with_shoal(case, shape, workers, Files(folder)), plain(case))


@contextmanager
def this_machine(cpus: int) -> Iterator[None]:
    """Let this process start its workers as child processes, without Ray."""
    with nodes_without_ray(cpus):
        yield
        end_gangs()


def main(pattern: str = "") -> int:
    """Print the differences of the cases whose names contain a text; return the number of those above their bounds."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder, this_machine(max(WORKERS)):
        chosen = [case for case in CASES if pattern in str(case)]
        for workers, case in itertools.product(WORKERS, chosen):
            for shape in shapes(case):
                try:
                    found = compared(case, shape, workers, Path(folder))
                    problems = ", ".join(found.problems(case))
                    figures = f"{found.predictions:9.1e} {found.metrics:9.1e} {found.last:9.1e} {found.rounds:+3}"
                except Exception as exc:
                    figures, problems = "", f"{type(exc).__name__}: {exc}"[:200]
                failed += bool(problems)
                print(f"{case!s:50} {shape!s:32} {workers} {figures}  {problems}", flush=True)
    print(f"{failed} of {len(chosen) * len(WORKERS) * 2} trainings differ by more than their bounds")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
