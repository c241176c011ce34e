"""LightGBM as a boosting library of shoal: its parameters and metrics, and its trained models.

LightGBM itself stores categories only if it is trained on a DataFrame. shoal trains on arrays, and stores the
categories in the format of LightGBM: the last line of the model's text contains the categories of each categorical
column. LightGBM's own `predict` therefore can encode the categorical columns of a DataFrame.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.data.numpy_columns import Categories, from_lists, to_lists, to_matrix
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import lightgbm, np, pa, pd
from shoal.training.boosting import library
from shoal.training.boosting.messages import History, Prepared, Task
from shoal.training.boosting.params import Directions, Objective, UserCode, seed_in
from shoal.training.boosting.worker_load import all_bins
from shoal.training.lightgbm import params as lgb_params
from shoal.training.sizing.worker_memory import HISTOGRAM_BYTES

if TYPE_CHECKING:
    from shoal.training.boosting.request import TrainRequest, TrainResult
    from shoal.training.gang.placement import GangShape


_TRUTH = {"true": True, "+": True, "false": False, "-": False}

_NOT_SUPPORTED = {
    "missing": 'write missing values as nulls, or, if they are written as 0, set the parameter "zero_as_missing"',
    "feature_weights": "it samples all features with the same probability; its parameter feature_contri scales the "
    "gain of splits instead",
    "label_lower_bound_col": "LightGBM has no objective for censored labels, so use XGBoost",
    "label_cols": "it has no models with several outputs of different labels, so train one model per label column",
    "label_upper_bound_col": "LightGBM has no objective for censored labels, so use XGBoost",
}
"""Field of a request that LightGBM does not support -> advice for the error message."""


@dataclass(frozen=True, slots=True)
class Share:
    """Position of a worker's rows among all rows. The position determines how many rows this worker adds to the sample.

    Args:
        rank: Rank of the worker.
        before: Number of rows of all lower ranks.
        rows: Number of rows of this worker.
        total: Number of rows of all workers.
    """

    rank: int
    before: int
    rows: int
    total: int

    def chosen(self, wanted: int, seed: int) -> np.ndarray:
        """Choose this worker's rows for the sample from which LightGBM finds its bins (intervals of feature values).

        The same share, sample size and seed always give the same rows.
        """
        wanted = min(wanted, self.total)
        count = (self.before + self.rows) * wanted // self.total - self.before * wanted // self.total
        if count == self.rows:
            return np.arange(self.rows)
        return np.sort(np.random.default_rng([seed, self.rank]).choice(self.rows, count, replace=False))


def shares(rows: Sequence[int]) -> list[Share]:
    """Compute each worker's `Share`: the position of its rows among the rows of all workers."""
    ends = [*itertools.accumulate(rows)]
    return [Share(rank, end - count, count, ends[-1]) for rank, (count, end) in enumerate(zip(rows, ends, strict=True))]


class LightGBM(library.Library):
    """LightGBM."""

    name = "lightgbm"
    worker = "shoal.training.lightgbm.worker"
    names = lgb_params.NAMES
    metric_param = "metric"
    file_name = "model.txt"
    unsupported = lgb_params.UNSUPPORTED
    ranking = lgb_params.RANKING
    multiclass = ("multiclass", "multiclassova")
    quantile_leaves = ("regression_l1", "quantile", "mape")
    functions_tell_direction = True
    combines_metrics = False
    gpus_by_default = False
    foreign_file = "the file is no model in LightGBM's text format: write it with Booster.save_model"

    reads = 2

    def reads_again(self, task: Task) -> bool:
        return lgb_params.begins_anew(task.params) or bool(task.columns.base_margin)

    def memory_fields(self, task: Task, features: int, all_rows: int, share: float) -> dict[str, Any]:
        params = task.params
        max_bin = int(params.get("max_bin", 255))
        each = 1 if max_bin <= 2**8 - 1 else 2
        sample_rows = min(all_rows, int(params.get("bin_construct_sample_cnt", SAMPLE_ROWS)))
        bins = all_bins(task.columns, max_bin, features)
        nodes = min(int(params.get("num_leaves", 31)), task.train.shard.rows)
        if (pool_mb := float(params.get("histogram_pool_size") or 0)) > 0:
            nodes = min(nodes, math.ceil(pool_mb * 2**20 / (HISTOGRAM_BYTES * bins)))
        return {
            "max_bin": max_bin,
            "bins": bins,
            "bin_bytes": each,
            "row_bin_bytes": each,
            "nodes": nodes,
            "outputs": int(params.get("num_class", 1)),
            "sample_rows": int(sample_rows * share),
            "whole_sample": sample_rows == all_rows,
        }

    def check_request(self, request: TrainRequest) -> None:
        names = request.input_cols
        self.check_feature_names(names, '",:[]{}')
        if "" in names:
            raise ValueError("input_cols contains an empty name, which lightgbm does not accept: rename the column")
        written = [name.replace(" ", "_") for name in names]
        for name, other in zip(names, written, strict=True):
            if name != other and written.count(other) > 1:
                raise ValueError(
                    f'input_cols contains "{name}", which lightgbm changes to "{other}", and another column has this '
                    "name, too: rename one of the columns"
                )
        for name, advice in _NOT_SUPPORTED.items():
            if (value := getattr(request, name)) not in (None, (), {}):
                raise ValueError(f"LightGBM does not support {name}={value!r}: {advice}")

    def merge_params(
        self, params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int
    ) -> dict[str, Any]:
        """Merge the parameters under canonical names, and convert texts that LightGBM reads as truth values."""
        merged = super().merge_params(params, objective, n_estimators)
        return {
            lgb_params.NAMES.canonical(name): _TRUTH.get(value.lower(), value) if isinstance(value, str) else value
            for name, value in merged.items()
        }

    def device_of(self, params: Mapping[str, Any]) -> str | None:
        device = params.get("device_type")
        return None if device is None else str(device)

    def why_cpu(self) -> str | None:
        return "LightGBM uses GPUs only with use_gpu=True, because its wheels on PyPI have no CUDA"

    def objective_of(self, params: Mapping[str, Any]) -> str:
        return lgb_params.objective_of(params)

    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        return lgb_params.gpu_problem(params["device_type"])

    def params(
        self, request: TrainRequest, size: GangShape, user_code: UserCode, init_model: library.InitModel | None = None
    ) -> tuple[dict[str, Any], int]:
        if request.external_memory:
            raise InvalidArgumentError(
                "LightGBM does not support external_memory: remove external_memory, or use XGBEstimator"
            )
        merged = self.merged(request, user_code.objective)
        self.check_objective(request, merged)
        custom = user_code.objective is not None
        params = lgb_params.worker_params(merged, request, size, custom_objective=custom)
        if request.early_stopping_rounds and params.get("boosting") == "dart":
            raise InvalidArgumentError(
                'boosting="dart" does not support early_stopping_rounds: dart changes earlier trees, so the model '
                "of the best round cannot be restored. Remove early_stopping_rounds, or set another value for boosting"
            )
        if request.early_stopping_rounds and all(each == request.dataset for each in request.eval_set.values()):
            raise InvalidArgumentError(
                "early_stopping_rounds needs an eval set that is not the training set, "
                "because LightGBM never stops on the training set: add such a dataset to eval_set, or remove "
                "early_stopping_rounds"
            )
        if request.early_stopping_rounds and not (user_code.metrics or lgb_params.has_metric(params)):
            raise InvalidArgumentError(
                "early_stopping_rounds needs a metric: set the parameter metric in params, or pass a custom_metric"
            )
        if lgb_params.is_forest(params) and (custom or request.margin_cols):
            raise InvalidArgumentError(
                'boosting="rf" (random forest) supports neither an objective function nor margins: remove '
                'them, or use boosting="gbdt"'
            )
        outputs = int(params.get("num_class", 1))
        request.check_margins(outputs)
        untrained, _ = lgb_params.check_params(params, request)
        if init_model is not None:
            if lgb_params.is_forest(params):
                raise InvalidArgumentError(
                    'boosting="rf" (random forest) cannot continue from a model, because LightGBM does not support it: '
                    "remove init_model, or set another value for boosting"
                )
            init_model.check_learner(objective_line(untrained), outputs, "gbdt")
        # LightGBM writes the number of rounds into the model's text, but does not use it here.
        params = {**params, "num_iterations": request.n_estimators}
        return params, seed_in(merged, request.run_config.seed, lgb_params.NAMES)

    def metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> Directions:
        return lgb_params.check_params(params, request)[1]

    def prepare(self, on_all: library.OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Make rank 0 find the bins from a sample of all workers' rows, and make all workers build their datasets."""
        sample_shares = shares([task.train.shard.rows for task in tasks])
        samples, machines = zip(*on_all("begin", list(zip(tasks, sample_shares, strict=True))), strict=True)
        bins = on_all("bin_sample", [(samples,), *[((),)] * (len(tasks) - 1)])[0]
        # These references are deleted, so that Ray frees the sample before the workers build their datasets.
        del samples
        return on_all("prepare", [(bins, machines)] * len(tasks))

    def joins_workers(self, request: TrainRequest, user_code: UserCode, rows: int) -> bool:
        """Return whether the table is wide and the user has set neither the learner nor the threads. Workers with parts
        of the columns (``tree_learner=feature``) would each need all rows."""
        given = lgb_params.resolved(self.merged(request, user_code.objective))
        return library.is_wide(len(request.input_cols), rows) and not given.keys() & {"tree_learner", "num_threads"}

    def content_of(self, booster: lightgbm.Booster) -> bytes:
        return str(booster.model_to_string()).encode()

    def booster_of(self, content: bytes) -> lightgbm.Booster:
        return lightgbm.Booster(model_str=content.decode())

    def train_rows(
        self, rows: Mapping[str, Any], params: Mapping[str, Any], rounds: int, user_code: UserCode
    ) -> lightgbm.Booster:
        own = {} if user_code.objective is None else {"objective": user_code.objective}
        data = lightgbm.Dataset(**rows, params={"verbosity": -1})
        return lightgbm.train({**params, **own}, data, rounds, callbacks=list(user_code.callbacks))

    def predict_rows(self, booster: lightgbm.Booster, rows: pd.DataFrame) -> np.ndarray:
        return np.asarray(booster.predict(rows, num_threads=1))

    def columns_of(self, booster: lightgbm.Booster) -> list[str]:
        return list(booster.feature_name())

    def recognises(self, content: bytes) -> bool:
        return content.startswith((b"tree\n", b"tree\r\n"))

    def why_damaged(self, content: bytes) -> str | None:
        if b"\r\n" in content:
            # The text contains the length of each tree.
            return (
                "the file's ends of lines were changed to those of Windows: write the model again, or copy it unchanged"
            )
        if b"\nend of trees" not in content or (b"\nparameters:" in content and b"\nend of parameters" not in content):
            return "the file is cut off: write the model again"
        return None

    def load(self, trained: TrainResult) -> lightgbm.Booster:
        """Load a trained model from LightGBM's text format, which contains neither the best round nor its score."""
        booster = lightgbm.Booster(model_str=trained.model.decode())
        best = trained.best_iteration
        if best is not None and best + 1 < booster.current_iteration():
            booster.model_from_string(booster.model_to_string(num_iteration=best + 1))
        # Without this call, eval_valid() and eval_train() would raise AttributeError.
        booster.free_dataset()
        booster.best_iteration = 0 if best is None else best + 1
        booster.best_score = defaultdict(OrderedDict)
        for name, metrics in trained.eval_results.items():
            for metric, values in metrics.items():
                booster.best_score[name][metric] = values[trained.final_round]
        booster.params = {**trained.params, **_as_train_sets(booster, trained.params)}
        return booster

    def serialised(self, model: Any) -> bytes:
        booster = _booster(model)
        if not isinstance(booster, lightgbm.Booster):
            raise InvalidArgumentError(
                f"LightGBM cannot continue from a {type(model).__module__}.{type(model).__name__}: pass a "
                "lightgbm.Booster, a LightGBM estimator that is fitted, the path of a model file, or an MLflow URI"
            )
        return str(booster.model_to_string(num_iteration=-1)).encode()

    def init_model(self, content: bytes) -> library.InitModel:
        errors = lightgbm.basic.LightGBMError, ValueError  # ValueError: no UTF-8, or the last line is no JSON
        booster = self.booster_to_continue(content, errors, lgb_params.own_message)
        return library.InitModel(
            content=content,
            rounds=booster.current_iteration(),
            features=tuple(self.features_of(booster)),
            num_features=booster.num_feature(),
            categories=categories_of(booster),
            # Splits of categories are sets of codes, and the parameter categorical_feature is for columns of such
            # codes.
            code_cols=(),
            objective=objective_line(booster),
            outputs=booster.num_model_per_iteration(),
            # The text has the same format for all kinds of boosting except random forests.
            booster="rf" if re.search(b"^average_output$", content, re.MULTILINE) else "gbdt",
        )

    def output_of(self, params: Mapping[str, Any], *, custom_objective: bool) -> library.Output:
        objective = "a function" if custom_objective else lgb_params.objective_of(self.merge_params(params, None, 1))
        classes = int(params.get("num_class") or params.get("num_classes") or 1)
        is_unbounded = custom_objective or objective in _UNBOUNDED
        return library.Output(objective, values=classes, classes=max(2, classes), is_unbounded=is_unbounded)

    def predictor(
        self, model: Any, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
    ) -> library.BoosterPredictor:
        booster = _booster(model)
        classes = getattr(model, "classes_", None) if hasattr(model, "predict_proba") else None
        return library.BoosterPredictor(
            _predict_of_booster(booster) if model is booster else _predict_of_estimator(model),
            tuple(input_cols),
            categories_of(booster),
            tuple(base_margin_cols),
            code_cols=columns_of_codes(booster, input_cols),
            classes=None if classes is None else tuple(classes.tolist()),
        )

    def features_of(self, model: lightgbm.Booster | lightgbm.LGBMModel) -> list[str]:
        names = list(_booster(model).feature_name())
        # LightGBM numbers the columns of an array in this way.
        return [] if names == [f"Column_{number}" for number in range(len(names))] else names

    def num_features(self, model: lightgbm.Booster | lightgbm.LGBMModel) -> int:
        return int(_booster(model).num_feature())

    def as_sklearn(
        self, booster: lightgbm.Booster, params: Mapping[str, Any], n_estimators: int, eval_results: History
    ) -> lightgbm.LGBMModel:
        """Wrap a booster in a fitted scikit-learn estimator."""
        from sklearn.preprocessing import LabelEncoder

        # If the objective is a function, `params` contain no objective, and the stored objective is "none".
        objective = (
            "none" if lgb_params.objective_of(stored_params(booster)) == "none" else lgb_params.objective_of(params)
        )
        kind = lightgbm.LGBMClassifier if objective in _CLASSIFYING else lightgbm.LGBMRegressor
        if objective in lgb_params.RANKING:
            kind = lightgbm.LGBMRanker
        shown = {name: value for name, value in params.items() if name not in _SHOWN_AS}
        renamed = {ours: params[theirs] for theirs, ours in _SHOWN_AS.items() if theirs in params}
        model = kind(**{**shown, **renamed, "n_estimators": n_estimators, "objective": objective})
        # LightGBM has no function that creates an estimator from a booster, so this code sets the attributes that `fit`
        # would set.
        model._Booster = booster
        model._best_iteration = booster.best_iteration
        model._best_score = booster.best_score
        model._evals_result = eval_results
        model._n_features = model._n_features_in = booster.num_feature()
        model._fitted_with_feature_names = True
        model.fitted_ = True
        if kind is lightgbm.LGBMClassifier:
            model._n_classes = max(2, booster.num_model_per_iteration())
            model._le = LabelEncoder().fit(range(model._n_classes))
            model._classes = model._le.classes_
            model._class_map = dict(zip(model._classes, model._classes, strict=True))
        return model


def stored_params(booster: lightgbm.Booster) -> dict[str, Any]:
    """Return the parameters of the training from a model's text, with all defaults and under canonical names.

    `booster.params` contain only the user's parameters.
    """
    return dict(booster._get_loaded_param())


def _as_train_sets(booster: lightgbm.Booster, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that ``lightgbm.train`` adds to the user's parameters."""
    stored = stored_params(booster)
    objective = "none" if lgb_params.objective_of(stored) == "none" else params.get("objective")
    added = {"objective": objective, "num_iterations": stored["num_iterations"]}
    categorical = stored.get("categorical_feature")
    return {**added, "categorical_column": categorical} if categorical and booster.pandas_categorical else added


# Number of values that are converted to float64 together: 4 MiB, or 16 k rows of 32 columns. In a table with many
# columns a slice has at least `_SLICE_ROWS` rows, because each column of a slice has a fixed cost.
_SLICE_VALUES = 2**19
_SLICE_ROWS = 1_024

SAMPLE_ROWS = 200_000
"""Number of rows in the sample for the bins if the user does not set `bin_construct_sample_cnt`; the same as LightGBM's
default."""

_UNBOUNDED = (*lgb_params.RANKING, "poisson", "gamma", "tweedie", "cross_entropy_lambda")
"""Objectives whose predictions are raw scores, counts or other numbers without an upper bound."""


def _booster(model: Any) -> Any:
    return model.booster_ if hasattr(model, "booster_") else model


def _predict_of_estimator(model: Any) -> library.Predict:
    # The estimator itself predicts, because it has more settings than its booster.
    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        with warnings.catch_warnings():
            # scikit-learn warns that an array has no names of columns. The columns are in the model's order.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            if hasattr(model, "predict_proba"):
                return library.class_probabilities(predict_table(model.predict_proba, features))
            return predict_table(model.predict, features)

    return predict


def _predict_of_booster(booster: lightgbm.Booster) -> library.Predict:
    objective = objective_line(booster)

    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        if margin is None:
            return predict_table(booster.predict, features)
        score = predict_table(booster.predict, features, raw_score=True)
        return converted(score + margin, objective)

    return predict


def predict_table(predict: Callable[..., np.ndarray], features: pa.Table, **options: Any) -> np.ndarray:
    """Predict the rows of a table, in float64 as LightGBM reads features, and in slices to limit the memory."""
    names = features.column_names
    size = slice_rows(len(features), len(names))
    slices = [features.slice(start, size) for start in range(0, max(1, len(features)), size)]
    return np.concatenate([predict(to_matrix(rows, names, "float64"), **options) for rows in slices])


def slice_rows(rows: int, columns: int) -> int:
    """Return how many rows to convert to float64 at a time: slices of about equal size, of 4 MiB or 1,024 rows."""
    most = max(_SLICE_ROWS, _SLICE_VALUES // columns)
    return max(1, math.ceil(rows / math.ceil(rows / most))) if rows else 1


def converted(score: np.ndarray, objective: str) -> np.ndarray:
    """Convert raw scores to predictions, as LightGBM's objective does."""
    name, *options = objective.split() or [""]
    predictions: np.ndarray = score
    if name in ("poisson", "gamma", "tweedie"):
        predictions = np.exp(score)
    elif name == "multiclass":
        likely = np.exp(score - score.max(axis=1, keepdims=True))
        predictions = likely / likely.sum(axis=1, keepdims=True)
    elif name in ("binary", "multiclassova", "cross_entropy"):
        steepness = next((float(each.removeprefix("sigmoid:")) for each in options if each.startswith("sigmoid:")), 1.0)
        predictions = 1 / (1 + np.exp(-steepness * score))
    elif name == "cross_entropy_lambda":
        predictions = np.log1p(np.exp(score))
    elif "sqrt" in options:
        predictions = np.sign(score) * score * score
    return predictions


def objective_line(booster: lightgbm.Booster) -> str:
    """Return the objective as the text of a model describes it; empty if the objective was a function."""
    lines = booster.model_to_string(num_iteration=1).splitlines()
    return next((line.removeprefix("objective=") for line in lines if line.startswith("objective=")), "")


def note(dataset: lightgbm.Dataset, categories: Categories) -> None:
    """Store the categories of categorical columns in a dataset. Models and other datasets that use this dataset inherit
    the categories.
    """
    if categories:
        dataset.pandas_categorical = list(to_lists(categories).values())


def categories_of(booster: lightgbm.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model; the result is empty if the model has none.

    LightGBM stores the categories of the columns with pandas' categorical type without the columns' names. These are
    the model's categorical columns, unless the program that trained the model used ordered categories or named other
    columns in `categorical_feature`.

    Raises:
        DataError: It is not known which columns the categories belong to, or their type is not supported.
    """
    lists = booster.pandas_categorical or []
    if not lists:
        return {}
    columns, ranges = _categorical_columns(booster)
    if len(columns) != len(lists) or any(
        max(_codes(ranges[column]), default=0) >= len(values) for column, values in zip(columns, lists, strict=True)
    ):
        raise DataError(
            f"the model has {len(lists)} lists of categories and {len(columns)} categorical columns that do not belong "
            "together, so the codes of the categories are not known: train the model with shoal (categorical_cols), or "
            "in LightGBM with unordered categories and without the argument categorical_feature"
        )
    names = booster.feature_name()
    return from_lists({names[column]: values for column, values in zip(columns, lists, strict=True)})


def columns_of_codes(booster: lightgbm.Booster, features: Sequence[str]) -> tuple[str, ...]:
    """Return the categorical columns whose categories a model does not contain, as it was trained on integer codes."""
    if booster.pandas_categorical:
        return ()
    return tuple(features[column] for column in _categorical_columns(booster)[0])


def _categorical_columns(booster: lightgbm.Booster) -> tuple[list[int], list[str]]:
    """Return the numbers of a model's categorical columns, and the description of each column's values in the model's
    text: ``[smallest:largest]`` of a numeric column, ``code:code:...`` of a categorical one, or ``none``."""
    # The text is used, because `booster.params` lacks the columns if the booster was in a pickled estimator.
    text = booster.model_to_string(num_iteration=1)
    [ranges] = re.findall(r"^feature_infos=(.*)$", text, re.MULTILINE)
    listed = re.search(r"^\[categorical_feature: ([\d,]*)\]$", text, re.MULTILINE)
    named = {int(number) for number in listed[1].split(",") if number} if listed else set()
    infos = ranges.split(" ")
    seen = {number for number, info in enumerate(infos) if info != "none" and not info.startswith("[")}
    return sorted(named | seen), infos


def _codes(values: str) -> list[int]:
    return [] if values == "none" or values.startswith("[") else [int(code) for code in values.split(":")]


_CLASSIFYING = ("binary", "multiclass", "multiclassova")
# LightGBM's parameter -> name of the corresponding argument of the scikit-learn estimator.
_SHOWN_AS = {"seed": "random_state", "boosting": "boosting_type", "num_threads": "n_jobs"}
