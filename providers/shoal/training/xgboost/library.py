"""XGBoost as a boosting library of shoal: its parameters, its metrics and its trained models.

XGBoost itself can store categories, but only for training data in DataFrames, which would need a copy of every batch.
In addition, XGBoost 3.2 confuses categories whose names are not ASCII. shoal therefore trains on category codes and
stores the categories in an attribute of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.data.numpy_columns import Categories, from_lists, to_lists, to_matrix
from shoal.errors import DataError, InvalidArgumentError
from shoal.lazy_imports import np, pa, pd, xgboost
from shoal.training.boosting.library import (
    BoosterPredictor,
    InitModel,
    Library,
    Output,
    Predict,
    class_probabilities,
    is_wide,
)
from shoal.training.boosting.params import Directions, UserCode, seed_in
from shoal.training.boosting.worker_load import all_bins, is_dense
from shoal.training.reporting import say
from shoal.training.timeouts import COLLECTIVE_S
from shoal.training.xgboost import params as xgb_params

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

    from shoal.training.boosting.messages import Columns, History, Task
    from shoal.training.boosting.request import TrainRequest, TrainResult
    from shoal.training.gang.gang import Gang
    from shoal.training.gang.placement import GangShape

_FULL_TREE, _ROWS_OF_FULL_LEAF = 64, 500
"""A tree has all nodes that its depth allows if they are few, or if each leaf has many rows. Measured with 100 to 2,000
columns, at depths of 6 to 10."""

# Number of times that a worker tries to connect to the tracker and to the other workers; the same as XGBoost's default.
_COLLECTIVE_RETRIES = 3
_CENSORED = "survival:aft"
# A matrix that is not quantised needs 8 bytes a value, so the workers together need 0.5 GiB at most.
_MOST_VALUES = 2**26
# Parameter -> its values, the default first, with which the workers can divide the columns. Trained by columns, the
# other values fail or give another model (XGBoost 3.2), and GPUs cannot.
_FOR_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "device": ("cpu",),
    "booster": ("gbtree", "dart"),
    "tree_method": ("auto", "hist"),
    "process_type": ("default",),
}


class XGBoost(Library):
    """XGBoost."""

    name = "xgboost"
    worker = "shoal.training.xgboost.worker"
    names = xgb_params.NAMES
    metric_param = "eval_metric"
    file_name = "model.ubj"
    unsupported = xgb_params.UNSUPPORTED
    ranking = ("rank:",)
    multiclass = ("multi:softmax", "multi:softprob")
    quantile_leaves = ("reg:absoluteerror", "reg:quantileerror")
    foreign_file = (
        "the file contains neither JSON nor UBJSON. If XGBoost has written it in its old binary format, which XGBoost "
        "3.1 and newer cannot read, then load it with XGBoost 3.0 or older, and write it with "
        'save_model("model.ubj")'
    )

    def check_request(self, request: TrainRequest) -> None:
        self.check_feature_names(request.input_cols, "[]<")
        missing = request.missing
        if missing is not None and request.categorical_cols and missing >= 0 and missing.is_integer():
            raise ValueError(
                f"missing={missing:g} is not possible with categorical_cols, because XGBoost would compare it "
                "with the numbers of categories: write missing values as nulls, or use a negative number such as -1"
            )

    def device_of(self, params: Mapping[str, Any]) -> str | None:
        """Return the parameter `device`, or None if `params` do not contain it.

        Raises:
            InvalidArgumentError: The device contains the number of a GPU. This is not allowed, because Ray assigns the
                GPUs to the workers.
        """
        device = params.get("device")
        if device is None:
            return None
        if ":" in str(device):
            raise InvalidArgumentError(
                f'device="{device}" selects one GPU by number, but Ray assigns a GPU to each worker: use device="cuda"'
            )
        return str(device)

    def why_cpu(self) -> str | None:
        return None if xgb_params.has_cuda() else xgb_params.without_cuda()

    def objective_of(self, params: Mapping[str, Any]) -> str:
        return str(params.get("objective"))

    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        return xgb_params.gpu_problem()

    def params(
        self, request: TrainRequest, size: GangShape, user_code: UserCode, init_model: InitModel | None = None
    ) -> tuple[dict[str, Any], int]:
        merged = self.merged(request, user_code.objective)
        self.check_objective(request, merged)
        objective = self.objective_of(merged)
        if (objective == _CENSORED) != bool(request.bound_cols):
            raise InvalidArgumentError(
                f'objective="{_CENSORED}" needs the bounds of the labels: set label_lower_bound_col and '
                "label_upper_bound_col"
                if objective == _CENSORED
                else f'label_lower_bound_col and label_upper_bound_col are only for objective="{_CENSORED}": set this '
                "objective, or remove both"
            )
        params = xgb_params.worker_params(merged, size)
        outputs = xgb_params.outputs_per_label(params)
        labels = max(1, len(request.label_cols))
        if labels > 1 and outputs > 1:
            raise InvalidArgumentError(
                f"label_cols names {labels} columns, and the parameters ask for {outputs} outputs per label: XGBoost "
                "has no such model, so train one model per label column"
            )
        outputs *= labels
        request.check_margins(outputs)
        seed = seed_in(merged, request.run_config.seed, xgb_params.NAMES)
        learner = xgb_params.check_params({**params, "seed": seed}, request)
        if init_model is not None:
            init_model.check_learner(learner["objective"]["name"], outputs, learner["gradient_booster"]["name"])
        weights = request.weights_of_features
        if weights and (advice := xgb_params.ignored_weights(params, weights)):
            say(advice)
        return params, seed

    def metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> Directions:
        return xgb_params.metrics_of(params, request)

    reads = 4
    reads_float32 = True
    trains_from_disk = True

    def memory_fields(self, task: Task, features: int, all_rows: int, share: float) -> dict[str, Any]:
        params, columns, rows = task.params, task.columns, task.train.shard.rows
        max_bin = int(params.get("max_bin") or 256)
        # XGBoost stores the number of each bin in 1, 2 or 4 bytes, depending on the column with the most bins, and in
        # 4 bytes if a value is missing. Each category is a bin.
        most = max([max_bin, *map(len, columns.categories.values())])
        each = 1 if most <= 2**8 else 2 if most <= 2**16 else 4
        depth, leaves = int(params.get("max_depth", 6)), int(params.get("max_leaves") or 0)
        nodes = min(2**depth if depth else math.inf, 2 * leaves if leaves else math.inf, rows)
        if nodes > _FULL_TREE and rows < _ROWS_OF_FULL_LEAF * nodes:
            # The trees have different numbers of nodes, and XGBoost doubles its memory when one has more than before.
            nodes *= 2
        outputs = xgb_params.outputs_per_label(params) * len(columns.labels)
        vectors = outputs if params.get("multi_strategy") == "multi_output_tree" else 1
        on_gpu = not str(params.get("device", "cpu")).startswith("cpu")
        return {
            "max_bin": 0 if on_gpu else max_bin,
            "bins": 0 if on_gpu else all_bins(columns, max_bin, features) * vectors,
            "bin_bytes": each,
            "row_bin_bytes": each if is_dense(task.train, columns.features) else 4,
            "nodes": int(nodes),
            "outputs": outputs,
        }

    def splits_columns(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode, rows: int) -> bool:
        """Return whether the workers divide the columns: the table is wide and fits in memory, and XGBoost then trains
        the same model as one worker."""
        columns = len(request.input_cols)
        return (
            is_wide(columns, rows)
            and rows * columns <= _MOST_VALUES
            and not any((user_code, request.external_memory, request.group_col, request.bound_cols))
            # One worker starts from scores of the quantised rows, which differ from those of the rows.
            and request.init_model is None
            and all(params.get(name, values[0]) in values for name, values in _FOR_COLUMNS.items())
            and params.get("objective") != "survival:cox"
            and "updater" not in params
            # XGBoost 3.3 has removed the split by columns.
            and hasattr(xgboost.core, "DataSplitMode")
        )

    def whole_metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> str:
        """Return the metrics whose values XGBoost combines only approximately."""
        return ", ".join(
            xgb_params.approximate(params.get("eval_metric"), request.group_col is not None, user_code.metrics)
        )

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Start XGBoost's tracker, and return the arguments with which each worker connects to the others.

        A single worker gets no tracker, because a tracker takes half a second to start.
        """
        if gang.shape.num_workers == 1:
            return [{}]
        from shoal.training.xgboost.tracker import Tracker

        tracker = gang.sidecar("xgboost", lambda on_death: Tracker(gang.host, gang.shape.num_workers, on_death))
        collective = {**tracker.begin(), "dmlc_timeout": COLLECTIVE_S, "dmlc_retry": _COLLECTIVE_RETRIES}
        return [collective] * gang.shape.num_workers

    def content_of(self, booster: xgboost.Booster) -> bytes:
        return bytes(booster.save_raw("ubj"))

    def booster_of(self, content: bytes) -> xgboost.Booster:
        return xgboost.Booster(model_file=bytearray(content))

    def train_rows(
        self, rows: Mapping[str, Any], params: Mapping[str, Any], rounds: int, user_code: UserCode
    ) -> xgboost.Booster:
        matrix = xgboost.DMatrix(**rows, nthread=int(params.get("nthread", 1)))
        callbacks = list(user_code.callbacks)
        return xgboost.train(dict(params), matrix, rounds, obj=user_code.objective, callbacks=callbacks)

    def predict_rows(self, booster: xgboost.Booster, rows: pd.DataFrame) -> np.ndarray:
        best = booster.attr("best_iteration")
        rounds = (0, 0 if best is None else int(best) + 1)
        return np.asarray(booster.predict(xgboost.DMatrix(rows, nthread=1), iteration_range=rounds))

    def recognises(self, content: bytes) -> bool:
        return content.startswith(b"{")

    def load_logged(self, folder: str, info: ModelInfo) -> Any:
        """Load a model unless its file would end the process."""
        with Path(folder, info.flavors[self.name]["data"]).open("rb") as file:
            if (why := self.why_unreadable(file.read(100))) is not None:
                raise ValueError(why)
        return super().load_logged(folder, info)

    def load(self, trained: TrainResult) -> xgboost.Booster:
        """Load a trained XGBoost model from its bytes, which contain the best round but not the parameters."""
        # The machine that loads the model may have no GPU. The file contains the starting scores, one per output, and
        # XGBoost refuses a single number for several outputs of a loaded model.
        kept = trained.params.keys() - {"device", "base_score"}
        params = xgb_params.native({name: value for name, value in trained.params.items() if name in kept})
        booster = xgboost.Booster(params, model_file=bytearray(trained.model))
        # XGBoost adds the objective's default metric to the booster at the first evaluation, even of no eval set.
        booster.eval_set([])
        return booster

    def serialised(self, model: Any) -> bytes:
        booster = _booster(model)
        if not isinstance(booster, xgboost.Booster):
            raise InvalidArgumentError(
                f"XGBoost cannot continue from a {type(model).__module__}.{type(model).__name__}: pass an "
                "xgboost.Booster, an XGBoost estimator that is fitted, the path of a model file, or an MLflow URI"
            )
        return bytes(booster.save_raw("ubj"))

    def init_model(self, content: bytes) -> InitModel:
        errors = xgboost.core.XGBoostError, UnicodeDecodeError
        booster = self.booster_to_continue(content, errors, xgb_params.own_message)
        categories = categories_of(booster)
        if categories and booster.attr(CATEGORIES_ATTRIBUTE) is None:
            booster = _without_own_categories(booster)
            note(booster, categories)
        # The best round belongs to the training that has ended. As in `xgboost.train`, all rounds are continued.
        booster.set_attr(best_iteration=None, best_score=None)
        learner = json.loads(booster.save_config())["learner"]
        sizes = learner["learner_model_param"]
        features = tuple(booster.feature_names or ())
        return InitModel(
            content=bytes(booster.save_raw("ubj")),
            rounds=booster.num_boosted_rounds(),
            features=features,
            num_features=booster.num_features(),
            categories=categories,
            code_cols=columns_of_codes(booster, features),
            objective=learner["objective"]["name"],
            outputs=max(1, int(sizes["num_class"]), int(sizes["num_target"])),
            booster=learner["gradient_booster"]["name"],
            missing=None if math.isnan(missing := missing_of(booster)) else missing,
        )

    def output_of(self, params: Mapping[str, Any], *, custom_objective: bool) -> Output:
        objective = "a function" if custom_objective else str(params.get("objective", "reg:squarederror"))
        gives_classes = not custom_objective and objective in _CLASSES
        return Output(
            objective,
            values=1 if gives_classes else xgb_params.outputs_per_label(params),
            classes=max(2, int(params.get("num_class") or 1)),
            gives_classes=gives_classes,
            is_unbounded=custom_objective or objective.startswith(_UNBOUNDED),
        )

    def predictor(
        self, model: Any, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
    ) -> BoosterPredictor:
        booster = _booster(model)
        is_classifier = hasattr(model, "predict_proba")
        learner = json.loads(booster.save_config())["learner"]
        objective, kind = learner["objective"]["name"], learner["gradient_booster"]["name"]
        return BoosterPredictor(
            _predict_of_booster(booster, kind) if model is booster else _predict_of_estimator(model, kind),
            tuple(input_cols),
            categories_of(booster),
            tuple(base_margin_cols),
            code_cols=columns_of_codes(booster, input_cols),
            classes=tuple(model.classes_.tolist()) if is_classifier else None,
            # XGBClassifier computes probabilities with multi:softmax, too.
            gives_classes=objective in _CLASSES and not (is_classifier and objective == "multi:softmax"),
        )

    def features_of(self, model: xgboost.Booster | xgboost.XGBModel) -> list[str]:
        return list(_booster(model).feature_names or [])

    def num_features(self, model: xgboost.Booster | xgboost.XGBModel) -> int:
        return int(_booster(model).num_features())

    def as_sklearn(
        self, booster: xgboost.Booster, params: Mapping[str, Any], n_estimators: int, eval_results: History
    ) -> xgboost.XGBModel:
        """Wrap a booster in a fitted scikit-learn estimator."""
        objective = str(params.get("objective", "reg:squarederror"))
        kinds = {"binary": xgboost.XGBClassifier, "multi": xgboost.XGBClassifier, "rank": xgboost.XGBRanker}
        kind = kinds.get(objective.split(":")[0], xgboost.XGBRegressor)
        settings: dict[str, Any] = {"n_estimators": n_estimators, "objective": objective}
        if not math.isnan(missing := missing_of(booster)):
            settings["missing"] = missing
        model = kind(**{**xgb_params.native(params), **settings})
        # XGBoost has no function that creates an estimator from a booster. `load_model` would lose the booster's
        # parameters, so this code sets the attributes that `fit` would set. The copy keeps `set_params` of the
        # estimator from changing `booster`.
        model._Booster = booster.copy()
        if eval_results:
            model.evals_result_ = eval_results
        if "c" in (booster.feature_types or ()):
            model.enable_categorical = True
        if kind is xgboost.XGBClassifier:
            model.n_classes_ = max(2, int(params.get("num_class", 0)))
        return model


def _without_own_categories(booster: xgboost.Booster) -> xgboost.Booster:
    """Return a model without the categories that XGBoost itself has stored.

    With them, XGBoost refuses to continue on codes of categories, although the codes are the same.
    """
    document = json.loads(booster.save_raw("json"))
    gradient_booster = document["learner"]["gradient_booster"]
    trees = gradient_booster.get("gbtree", gradient_booster)["model"]
    trees["cats"] = {"enc": [], "feature_segments": [], "sorted_idx": []}
    return xgboost.Booster(model_file=bytearray(json.dumps(document).encode()))


_CLASSES = ("multi:softmax", "binary:hinge")
"""Objectives whose predictions are numbers of classes and not probabilities."""

_UNBOUNDED = ("rank:", "count:", "survival:", "binary:logitraw", "reg:gamma", "reg:tweedie")
"""Beginnings of the objectives whose predictions are raw scores, counts or times."""


def _booster(model: Any) -> Any:
    return model.get_booster() if hasattr(model, "get_booster") else model


def _predict_of_booster(booster: xgboost.Booster, kind: str) -> Predict:
    best = booster.attr("best_iteration")
    rounds = (0, 0) if best is None or kind == "gblinear" else (0, int(best) + 1)
    missing = missing_of(booster)

    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        matrix = to_matrix(features, features.column_names)
        if kind == "gbtree":
            options = {"iteration_range": rounds, "missing": missing, "base_margin": margin}
            return np.asarray(booster.inplace_predict(matrix, **options))
        # `inplace_predict` refuses a linear booster, and adds a base margin wrongly to the trees of "dart" (XGBoost
        # 3.2).
        rows = xgboost.DMatrix(
            matrix,
            missing=missing,
            base_margin=margin,
            feature_names=booster.feature_names,
            feature_types=booster.feature_types,
            enable_categorical=True,
        )
        return np.asarray(booster.predict(rows, iteration_range=rounds))

    return predict


def _predict_of_estimator(model: Any, kind: str) -> Predict:
    names = model.get_booster().feature_names

    # The estimator itself predicts, because it has more settings than its booster, such as `missing`.
    def predict(features: pa.Table, margin: np.ndarray | None) -> np.ndarray:
        matrix: Any = to_matrix(features, features.column_names)
        if kind == "gblinear" and names:
            # XGBoost compares the names of the columns if the booster is linear.
            matrix = pd.DataFrame(matrix, columns=names)
        if hasattr(model, "predict_proba"):
            return class_probabilities(model.predict_proba(matrix, base_margin=margin))
        return np.asarray(model.predict(matrix, base_margin=margin))

    return predict


CATEGORIES_ATTRIBUTE = "shoal.categories"
"""Name of the model attribute that contains the categories as JSON: column -> list of its categories. The code of a
category is its index in this list."""


def stored_types(columns: Columns) -> list[str]:
    """Return the type of each column that XGBoost stores in a model that is trained on a table with these columns."""
    types = (columns.types.get(name, "") for name in columns.features)
    numbers = ("int" if "int" in type_ else "i" if type_ == "bool" else "float" for type_ in types)
    return [
        "c" if name in columns.categories else number for name, number in zip(columns.features, numbers, strict=True)
    ]


def note(booster: xgboost.Booster, categories: Categories) -> None:
    """Store the categories of categorical columns in an attribute of a model, so that the saved model contains the
    categories."""
    if categories:
        booster.set_attr(**{CATEGORIES_ATTRIBUTE: json.dumps(to_lists(categories))})


def categories_of(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """Read the categories of each categorical column from a model; the result is empty if the model has none.

    A model that shoal did not train has the categories that XGBoost itself has stored, in XGBoost's order.

    Raises:
        DataError: XGBoost has stored the categories wrongly, or with a type that shoal does not support.
    """
    noted = booster.attr(CATEGORIES_ATTRIBUTE)
    return _stored(booster) if noted is None else from_lists(json.loads(noted))


def columns_of_codes(booster: xgboost.Booster, features: Sequence[str]) -> tuple[str, ...]:
    """Return the categorical columns whose categories a model does not contain, as it was trained on integer codes."""
    known = categories_of(booster)
    types = booster.feature_types or []
    return tuple(name for name, type_ in zip(features, types, strict=False) if type_ == "c" and name not in known)


def _stored(booster: xgboost.Booster) -> dict[str, pa.Array]:
    """Read the categories that XGBoost itself has stored in a model that was trained on a DataFrame."""
    if "c" not in (booster.feature_types or []):
        return {}
    found = booster.get_categories(export_to_arrow=True)
    lists = {}
    for name, values in [] if found is None else found.to_arrow():
        if values is None:
            continue
        # XGBoost 3.2 cuts texts that are not ASCII: it stores the first two of the four bytes of "öö".
        if any(byte >= 0x80 for byte in _text_bytes(values)):
            raise DataError(
                f'the model\'s categories of column "{name}" are not ASCII. XGBoost stores such categories wrongly, '
                "so that they are not known: train the model with shoal (categorical_cols), or on categories of "
                "ASCII characters"
            )
        lists[str(name)] = values.to_pylist()
    return from_lists(lists)


def _text_bytes(values: pa.Array) -> bytes:
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    data = values.buffers()[-1] if is_text else None
    return b"" if data is None else data.to_pybytes()


MISSING_ATTRIBUTE = "shoal.missing"
"""Name of the model attribute that contains the value of the features that counts as missing, besides NaN."""


def note_missing(booster: xgboost.Booster, missing: float | None) -> None:
    """Store the value that counts as missing in an attribute of a model, so that predictions use it."""
    if missing is not None:
        booster.set_attr(**{MISSING_ATTRIBUTE: repr(missing)})


def missing_of(booster: xgboost.Booster) -> float:
    """Return the value of the features that counts as missing, besides NaN; NaN if a model has no such value."""
    noted = booster.attr(MISSING_ATTRIBUTE)
    return math.nan if noted is None else float(noted)
