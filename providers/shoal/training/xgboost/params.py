"""Parameters of XGBoost: conversions and checks, the metrics, and the device.

XGBoost does not combine all metrics of workers exactly, and it accepts only one custom metric function.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, InvalidParamsError
from shoal.installation import pip_install
from shoal.lazy_imports import np, xgboost
from shoal.training.boosting.params import (
    ONE_WORKER,
    ROUNDS,
    Direction,
    Directions,
    Metric,
    Names,
    Unsupported,
    refuse_unsupported,
    unknown_hint,
)

if TYPE_CHECKING:
    from shoal.training.boosting.request import TrainRequest
    from shoal.training.gang.placement import GangShape

NAMES = Names(
    "XGBoost",
    # If `params` contain the same parameter under two names, XGBoost silently ignores one of the two values. With these
    # aliases, shoal finds such pairs, and raises an error if the values differ.
    aliases={
        "eta": "learning_rate",
        "gamma": "min_split_loss",
        "lambda": "reg_lambda",
        "alpha": "reg_alpha",
        "n_jobs": "nthread",
        "random_state": "seed",
        "num_boost_round": ROUNDS,
        "num_round": ROUNDS,
    },
    objectives={"reg:linear": "reg:squarederror"},
)
_QUANTISED = "it cannot train on quantised data (histogram bins), which shoal uses"
UNSUPPORTED = (
    Unsupported(
        name="objective",
        values=("survival:cox",),
        reason="the loss of a row sums over all rows at risk, and each worker sums over its own rows only",
    ),
    Unsupported(
        name="eval_metric",
        values=("cox-nloglik", "ams"),
        reason="XGBoost cannot evaluate this metric in several workers",
        remedy=f"{ONE_WORKER}, or use another metric",
    ),
    Unsupported(
        name="lambdarank_unbiased",
        reason="each worker estimates the bias of positions from its own groups only",
    ),
    Unsupported(
        name="tree_method",
        values=("exact", "approx", "gpu_hist"),
        only_several_workers=False,
        reason=_QUANTISED,
        remedy='remove tree_method, or set it to "hist"',
    ),
    Unsupported(
        name="booster",
        values=("gblinear",),
        only_several_workers=False,
        reason=_QUANTISED,
        remedy='use "gbtree" or "dart"',
    ),
    Unsupported(
        name="updater",
        allowed=("grow_quantile_histmaker", "grow_gpu_hist"),
        only_several_workers=False,
        reason="other updaters cannot build trees from quantised data (histogram bins), which shoal uses",
        remedy="remove updater",
    ),
    Unsupported(
        name="process_type",
        values=("update",),
        only_several_workers=False,
        reason="shoal trains new trees and does not update those of another model",
        remedy="remove process_type",
    ),
)
"""Parameters with which the library cannot train. The table in docs/training.md is written from them: run
``python -m tests.support.unsupported_table``. Each remedy was tried: for example, one worker trains the model of the
plain library."""
_SET_BY_SHOAL = ("nthread", "n_jobs", "seed", "random_state")
_SAMPLING_OF_FEATURES = ("colsample_bytree", "colsample_bylevel", "colsample_bynode")
_SAMPLING = ("subsample", *_SAMPLING_OF_FEATURES)
# Arguments that shoal refuses in `params`, because they belong to other interfaces of XGBoost. Each value is a text
# that tells the user how to set the argument in shoal.
_REFUSED = {
    "early_stopping_rounds": "pass it to fit()",
    "verbose_eval": "pass it to fit()",
    "callbacks": "pass them to the estimator",
    "enable_categorical": "name the columns in fit(categorical_cols=); models of partitions have none",
    "missing": "pass it to fit(missing=), or set the field missing of the spec",
}


def native(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters that were read from JSON as XGBoost takes them: it accepts ``monotone_constraints`` as a tuple,
    but not as a list."""
    return {
        name: tuple(value) if name == "monotone_constraints" and isinstance(value, list) else value
        for name, value in params.items()
    }


def is_stochastic(params: Mapping[str, Any]) -> bool:
    """Return whether XGBoost uses random numbers in a training with these parameters, for example to sample rows."""
    return (
        any(float(params.get(name, 1)) < 1 for name in _SAMPLING)
        or params.get("booster") == "dart"
        # From XGBoost 3.4 on, "gbtree" drops trees, too.
        or any(float(params.get(name, 0)) for name in ("rate_drop", "one_drop"))
        # Ranking objectives may choose pairs of rows at random, so they count as stochastic.
        or str(params.get("objective")).startswith("rank:")
    )


def ignored_weights(params: Mapping[str, Any], weights: Sequence[float]) -> str | None:
    """Return a line for the log if XGBoost ignores weights of features, or uses features of weight 0; None if not."""
    drawn = len(weights)
    for name in _SAMPLING_OF_FEATURES:
        drawn = max(1, int(round(drawn * float(params.get(name, 1)), 6)))
    if drawn == len(weights):
        return "feature_weights have no effect, because the parameters colsample_* select all features"
    above = sum(weight > 0 for weight in weights)
    if drawn <= above:
        return None
    return (
        f"XGBoost will also use features of weight 0, because the parameters colsample_* select {drawn} features, and "
        f"only {above} of feature_weights are above 0"
    )


def worker_params(params: Mapping[str, Any], size: GangShape) -> dict[str, Any]:
    """Return the parameters that every worker passes to XGBoost, without the seed, which each worker adds.

    Raises:
        InvalidArgumentError: `params` contain another number of threads, or a parameter with which the workers cannot
            train.
    """
    for name in ("nthread", "n_jobs"):
        if params.get(name) not in (None, size.threads):
            raise InvalidArgumentError(
                f"params contain {name}={params[name]!r}, but each worker has {size.threads} CPUs: "
                f"remove {name} and set XGBScalingConfig(num_cpu_per_worker={params[name]!r})"
            )
    refuse_unsupported(UNSUPPORTED, params, size.num_workers)
    rest = {name: value for name, value in params.items() if name not in _SET_BY_SHOAL}
    return {**native(rest), "nthread": size.threads, "device": "cuda" if size.gpus_per_worker else "cpu"}


def outputs_per_label(params: Mapping[str, Any]) -> int:
    """Return the number of raw scores per row and label of a model: one per class or quantile."""
    quantiles = params.get("quantile_alpha")
    return len(quantiles) if isinstance(quantiles, list | tuple) else max(1, int(params.get("num_class") or 1))


def check_params(params: Mapping[str, Any], request: TrainRequest) -> dict[str, Any]:
    """Make XGBoost check the parameters of a request in this process, before any worker starts.

    The check uses two rows and takes 8 ms.

    Raises:
        InvalidParamsError: XGBoost refuses a value, or cannot compute a metric of this objective; the message contains
            XGBoost's message.
        InvalidArgumentError: XGBoost does not know a parameter, or would not use it. Without this check, XGBoost would
            only print a warning.
    """
    # The check uses the CPU, because the driver's node may have no GPU.
    probed = {**params, "device": "cpu", "verbosity": 1}
    probed.setdefault("validate_parameters", True)
    rows = _probe(params, request)
    known = set(NAMES.aliases)

    def noted(settings: dict[str, Any]) -> dict[str, Any]:
        known.update(name for name, value in settings.items() if not isinstance(value, dict | list))
        return settings

    with _log_of_this_thread() as lines:
        try:
            booster = xgboost.Booster(probed, [rows])
            if len(request.label_cols) > 1:
                booster.update(rows, 0)  # an objective that accepts one label only says so here
            config: dict[str, Any] = json.loads(booster.save_config(), object_hook=noted)
        except (xgboost.core.XGBoostError, ValueError, TypeError) as exc:
            raise InvalidParamsError(f"XGBoost refuses the parameters: {own_message(exc)}") from exc
    lists = re.findall(r"Parameters: \{(.*?)\} are not used", " ".join(lines), re.DOTALL)
    if unused := re.findall(r'"([^"]+)"', " ".join(lists)):
        raise InvalidArgumentError("; ".join(_describe_unused(name, params, sorted(known)) for name in unused))
    if request.eval_set:
        _check_metrics(probed, rows)
    return dict(config["learner"])


@contextmanager
def _log_of_this_thread() -> Iterator[list[str]]:
    """Collect what XGBoost logs in this thread.

    XGBoost has a callback for each thread, and sets one only in the thread that imports it. In all other threads it
    prints its warnings, so that neither Python's warnings nor this check would see them.
    """
    library = xgboost.core._LIB
    lines: list[str] = []
    callback = type(library.callback)(lambda line: lines.append(line.decode(errors="replace")))
    library.XGBRegisterLogCallback(callback)
    try:
        yield lines
    finally:
        library.XGBRegisterLogCallback(library.callback)


def _probe(params: Mapping[str, Any], request: TrainRequest) -> xgboost.DMatrix:
    """Return two rows with which XGBoost can check parameters and compute the metrics.

    Every objective accepts the labels 0 and 1. With several label columns, gradients are computed, too: then all labels
    are 1, because some objectives need positive labels.
    """
    columns, labels = request.input_cols, len(request.label_cols)
    rows = xgboost.DMatrix(
        np.zeros((2, len(columns)), np.float32),
        label=np.ones((2, labels)) if labels > 1 else [0, 1],
        feature_names=list(columns),
        feature_types=feature_types(columns, request.categorical_cols),
        enable_categorical=bool(request.categorical_cols),
        nthread=1,
    )
    if request.group_col is not None:
        rows.set_group([2])
    if params.get("objective") == "survival:aft":
        rows.set_float_info("label_lower_bound", [1.0, 1.0])
        rows.set_float_info("label_upper_bound", [1.0, 2.0])
    return rows


def _check_metrics(params: Mapping[str, Any], rows: Any) -> None:
    """Raise InvalidParamsError if XGBoost cannot compute a metric of `eval_metric` for these rows and the objective."""
    asked = params.get("eval_metric")
    for metric in [asked] if isinstance(asked, str) else list(asked or []):
        try:
            xgboost.Booster({**params, "eval_metric": metric, "verbosity": 0}, [rows]).eval(rows)
        except xgboost.core.XGBoostError as exc:
            objective = params.get("objective", "reg:squarederror")
            raise InvalidParamsError(
                f'XGBoost cannot compute eval_metric="{metric}" with objective="{objective}": use a metric that suits '
                "the objective, or remove eval_metric to get the metric of the objective. XGBoost's message: "
                f"{own_message(exc)}"
            ) from exc


_HIGHER_IS_BETTER = frozenset({"auc", "aucpr", "pre", "map", "ndcg", "ams", "interval-regression-accuracy"})
_LOWER_IS_BETTER = frozenset(
    {
        *("rmse", "rmsle", "mae", "mape", "mphe", "quantile", "logloss", "error", "merror", "mlogloss"),
        *("poisson-nloglik", "gamma-nloglik", "gamma-deviance", "tweedie-nloglik", "cox-nloglik", "aft-nloglik"),
    }
)


def direction_of(metric: str) -> Direction | None:
    """Return the direction of one of XGBoost's metrics; None if it is not known.

    XGBoost's callback EarlyStopping guesses by the beginning of the name, and therefore minimises ``ams@K`` and
    ``interval-regression-accuracy``.
    """
    name = metric.split("@")[0].removesuffix("-")
    return "maximize" if name in _HIGHER_IS_BETTER else "minimize" if name in _LOWER_IS_BETTER else None


def metrics_of(params: Mapping[str, Any], request: TrainRequest) -> Directions:
    """Return the metrics that XGBoost evaluates with these parameters, which :func:`check_params` has checked."""
    rows = _probe(params, request)
    try:
        line = xgboost.Booster({**params, "device": "cpu", "verbosity": 0}, [rows]).eval(rows)
    except xgboost.core.XGBoostError:  # the metric of the objective does not suit the labels of the probe
        return {}
    names = [each.removeprefix("eval-").rpartition(":")[0] for each in line.split("\t")[1:]]
    return {name: direction_of(name) for name in names}


def own_message(exc: BaseException) -> str:
    """Return the message of an error from XGBoost without the stack trace, the time and the C++ source line."""
    text = str(exc).split("Stack trace:")[0].strip()
    return re.sub(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", text)


def _describe_unused(name: str, params: Mapping[str, Any], known: Sequence[str]) -> str:
    if name in _REFUSED:
        return f"{name} is not a parameter of XGBoost's learner: {_REFUSED[name]}"
    objective = params.get("objective", "reg:squarederror")
    return (
        f"XGBoost does not know the parameter {name!r}, or does not use it with objective {objective}"
        f"{unknown_hint(name, known)}"
    )


_WITHIN_GROUPS = frozenset({"auc", "aucpr", "map", "ndcg", "pre"})
"""Metrics that compare rows with each other. If the rows have groups, XGBoost compares only rows of the same group, and
its mean over the groups of all workers is exact. Otherwise each worker compares only its own rows."""


def approximate(eval_metric: Any, grouped: bool, custom: Sequence[Metric]) -> list[str]:
    """Return the names of the metrics for which XGBoost combines the workers' values only approximately."""
    names = [eval_metric] if isinstance(eval_metric, str) else list(eval_metric or [])
    # A name may have a suffix such as "@5" (ndcg@5) or "-" (map-).
    found = [] if grouped else [name for name in names if re.split("[@-]", str(name))[0] in _WITHIN_GROUPS]
    return [*found, *(f"custom_metric {getattr(one, '__name__', type(one).__name__)}" for one in custom)]


def joined(metrics: Sequence[Metric]) -> Metric | None:
    """Combine several metric functions into one function that returns the values of all metrics.

    Returns:
        A function that returns the values of all metrics; None if there are no metrics.
    """
    if not metrics:
        return None

    def evaluate(predictions: Any, matrix: Any) -> list[tuple[str, float]]:
        given = [metric(predictions, matrix) for metric in metrics]
        found = []
        for one in itertools.chain(*(each if isinstance(each, list) else [each] for each in given)):
            try:
                name, value = one
                value = float(value)
            except (TypeError, ValueError):
                raise InvalidArgumentError(
                    f"a custom_metric for XGBoost must return (name, value), not {one!r}"
                ) from None
            if not isinstance(name, str) or not name or re.search(r"[\s:]", name):
                raise InvalidArgumentError(
                    f'the name of a custom_metric must be a non-empty str without spaces or ":", not {name!r}'
                )
            found.append((name, value))
        return found

    return evaluate


def without_cuda() -> str:
    """Return the message for users whose XGBoost was built without CUDA and therefore cannot use GPUs."""
    return (
        "the installed XGBoost has no CUDA, like the wheel xgboost-cpu. For GPUs, run `pip uninstall xgboost-cpu "
        f"xgboost` and then `{pip_install('xgboost-gpu')}` on each node"
    )


def has_cuda() -> bool:
    """Return whether the installed XGBoost was built with CUDA."""
    return bool(xgboost.build_info().get("USE_CUDA"))


def gpu_problem() -> str | None:
    """Return the reason why XGBoost cannot train on a GPU in this process, with advice for the user; None if GPUs
    work."""
    if not has_cuda():
        return f"{without_cuda()}; to train on CPUs, set use_gpu=False"
    # If XGBoost finds no GPU, it raises no error: it prints a warning and sets the device in its configuration to
    # "cpu".
    rows = xgboost.DMatrix(np.zeros((2, 1), np.float32), label=[0, 1], nthread=1)
    config = json.loads(xgboost.Booster({"device": "cuda", "verbosity": 0}, [rows]).save_config())
    if config["learner"]["generic_param"]["device"] != "cpu":
        return None
    return (
        "XGBoost finds no NVIDIA GPU that it can use: check that the driver version in the output of `nvidia-smi` "
        "supports XGBoost's CUDA version, and that CUDA_VISIBLE_DEVICES names GPUs of the node. To train on CPUs, set "
        "use_gpu=False"
    )


def feature_types(features: Sequence[str], categorical: Collection[str]) -> list[str]:
    """Return XGBoost's feature type of each column: "c" for category codes, "q" for numbers."""
    return ["c" if name in categorical else "q" for name in features]
