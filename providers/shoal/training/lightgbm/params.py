"""Check the user's LightGBM parameters and build the parameters of the workers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError, InvalidParamsError
from shoal.lazy_imports import lightgbm, np
from shoal.training.boosting.params import (
    ONE_WORKER,
    ROUNDS,
    Direction,
    Directions,
    Names,
    Unsupported,
    add_once,
    refuse_unsupported,
    unknown_hint,
)

if TYPE_CHECKING:
    from shoal.training.boosting.request import TrainRequest
    from shoal.training.gang.placement import GangShape

# Aliases of the parameters that shoal needs before LightGBM is imported. LightGBM itself has the list of all other
# aliases, which `resolved` uses.
_PARAMETER_ALIASES = {
    "objective": ("objective_type", "app", "application", "loss"),
    ROUNDS: (
        *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round", "num_rounds"),
        *("nrounds", "num_boost_round", "max_iter"),
    ),
    "seed": ("random_seed", "random_state"),
    "device_type": ("device",),
    "num_class": ("num_classes",),
}
_OBJECTIVE_ALIASES = {
    "regression": (
        *("regression_l2", "l2", "mean_squared_error", "mse", "l2_root", "root_mean_squared_error", "rmse"),
    ),
    "regression_l1": ("l1", "mean_absolute_error", "mae"),
    "mape": ("mean_absolute_percentage_error",),
    "multiclass": ("softmax",),
    "multiclassova": ("multiclass_ova", "ova", "ovr"),
    "cross_entropy": ("xentropy",),
    "cross_entropy_lambda": ("xentlambda",),
    "rank_xendcg": ("xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"),
    "none": ("None", "null", "custom", "na"),
}
NAMES = Names(
    "LightGBM",
    aliases={alias: name for name, aliases in _PARAMETER_ALIASES.items() for alias in aliases},
    objectives={alias: name for name, aliases in _OBJECTIVE_ALIASES.items() for alias in aliases},
)
# Names of the seeds that LightGBM derives from `seed`. If the user sets one of these seeds, segment 0 (the rounds up to
# the first checkpoint) uses the user's value. If each segment needs its own seeds (see `begins_anew`), segment N uses
# the user's value plus N.
_SEEDS = ("bagging_seed", "feature_fraction_seed", "drop_seed", "extra_seed", "objective_seed")
UNSUPPORTED = (
    Unsupported(
        name="linear_tree",
        only_several_workers=False,
        reason="LightGBM trains linear trees only in one process and with all rows in memory",
        remedy="remove linear_tree",
    ),
    Unsupported(
        name="tree_learner",
        allowed=("data", "data_parallel", "voting", "voting_parallel", "serial"),
        only_several_workers=False,
        reason="other learners need all rows in each worker",
        remedy='remove tree_learner, or set it to "data" or "voting"',
    ),
    Unsupported(
        name="tree_learner",
        values=("serial",),
        reason="it cannot train on rows that are divided among workers",
        remedy=f'{ONE_WORKER}, remove tree_learner, or set it to "data" or "voting"',
    ),
    Unsupported(
        name="interaction_constraints",
        reason="LightGBM crashes with it in several workers",
        remedy=f"{ONE_WORKER}, or use XGBEstimator",
    ),
    Unsupported(
        name="monotone_constraints_method",
        values=("intermediate", "advanced"),
        reason='LightGBM replaces it by "basic" in several workers',
        remedy=f'{ONE_WORKER}, or set it to "basic"',
    ),
    Unsupported(
        name="forcedsplits_filename",
        reason="LightGBM refuses forced splits in several workers",
    ),
    Unsupported(
        name="min_data_in_leaf",
        values=("0",),
        reason="LightGBM then estimates the rows of a leaf, and fails if an estimate is 0",
        remedy="set it to 1 or more",
    ),
    Unsupported(
        name="cegb_penalty_feature_lazy",
        reason="LightGBM keeps account of the rows for which a feature was used per worker, and trains another model",
    ),
    Unsupported(
        name="cegb_penalty_feature_coupled",
        reason="each worker then grows other trees, because LightGBM keeps account of the used features per worker",
    ),
)
"""Parameters with which the library cannot train. The table in docs/training.md is written from them: run
``python -m tests.support.unsupported_table``. Each remedy was tried: for example, one worker trains the model of the
plain library."""
RANKING = ("lambdarank", "rank_xendcg")
"""Names of the objectives that rank rows within groups, and therefore need a group column."""
# Parameters that shoal refuses in `params`, because they belong to other interfaces of LightGBM. Each value is a text
# that tells the user what to do instead.
_GANG = "remove this parameter, because shoal connects the workers itself"
_FILES = "remove this parameter, which is only for LightGBM's command line"
_REFUSED = {
    "early_stopping_round": "pass early_stopping_rounds to fit()",
    "early_stopping_min_delta": "remove this parameter, because fit(early_stopping_rounds=) counts every improvement",
    "first_metric_only": "remove this parameter, because fit(early_stopping_rounds=) uses the last metric",
    "verbose_eval": "pass it to fit()",
    "callbacks": "pass them to the estimator",
    "label_column": "pass label_col to fit()",
    "weight_column": "pass weight_col to fit()",
    "group_column": "pass group_col to fit()",
    "ignore_column": "remove the column from input_cols instead",
    **dict.fromkeys(("num_machines", "local_listen_port", "time_out", "machine_list_filename", "machines"), _GANG),
    **dict.fromkeys(("config", "task", "data", "valid", "input_model", "output_model", "snapshot_freq"), _FILES),
}


def objective_of(params: Mapping[str, Any]) -> str:
    """Return the canonical name of the objective in merged parameters; LightGBM's default is "regression"."""
    return str(NAMES.objective(params.get("objective") or "regression"))


def worker_params(
    params: Mapping[str, Any], request: TrainRequest, size: GangShape, *, custom_objective: bool = False
) -> dict[str, Any]:
    """Return the parameters that every worker passes to LightGBM, under canonical names and without the seed.

    Raises:
        InvalidArgumentError: A parameter is unknown, contradicts another parameter or the scaling config, or is not
            possible in distributed training.
    """
    given, workers, threads = resolved(params), size.num_workers, size.threads
    if given.get("num_threads") not in (None, 0, threads):
        raise InvalidArgumentError(
            f"params contain num_threads={given['num_threads']!r}, but each worker has {threads} CPUs: "
            f"remove num_threads and set LightGBMScalingConfig(num_cpu_per_worker={given['num_threads']!r})"
        )
    refuse_unsupported(UNSUPPORTED, given, workers)
    learner = str(given.get("tree_learner", "data"))
    device = given.get("device_type", "cuda") if size.gpus_per_worker else "cpu"
    if device == "cuda" and workers > 1:
        raise InvalidArgumentError(
            f"LightGBM can use CUDA only in a single worker, but there are {workers} workers: set num_workers=1, or "
            'train with OpenCL (params={"device": "gpu"})'
        )
    if custom_objective:
        given["objective"] = "none"
    elif objective_of(given) == "none":
        raise InvalidArgumentError(
            f'objective="{given["objective"]}" means that the objective is a function: pass the function to the '
            "estimator as objective"
        )
    rest = {name: value for name, value in given.items() if name != "seed"}
    if request.categorical_cols:
        if "categorical_feature" in rest:
            raise InvalidArgumentError(
                "categorical columns are given both in params (categorical_feature) and in fit(categorical_cols=): "
                "give all of them in fit(categorical_cols=) and remove categorical_feature from params"
            )
        rest["categorical_feature"] = list(request.categorical_cols)
    elif "categorical_feature" in rest:
        rest["categorical_feature"] = _categories(rest["categorical_feature"], request.input_cols)
    if not rest.get("force_row_wise"):
        # Without force_col_wise, LightGBM measures two methods of building histograms, row-wise and column-wise, and
        # uses the faster method. The model depends on the method, so it would not be reproducible. shoal selects the
        # column-wise method, because it needs half as much memory.
        rest["force_col_wise"] = True
    return {
        "verbosity": -1,
        # feature_pre_filter removes features that LightGBM cannot split with the rows of the sample. The filter is
        # switched off, because LightGBM may be able to split such a feature with all rows.
        "feature_pre_filter": False,
        **rest,
        "deterministic": True,
        "num_threads": threads,
        "num_machines": workers,
        "tree_learner": "serial" if workers == 1 else learner,
        "device_type": device,
    }


def has_metric(params: Mapping[str, Any]) -> bool:
    """Return whether LightGBM evaluates at least one metric of its own.

    If the parameter `metric` is not set, LightGBM evaluates the metric of the objective.
    """
    named = _metrics(params.get("metric"))
    return any(NAMES.objective(name) != "none" for name in named) if named else objective_of(params) != "none"


_HIGHER_IS_BETTER = frozenset({"auc", "auc_mu", "average_precision", "map", "ndcg", "r2"})
_LOWER_IS_BETTER = frozenset(
    {
        *("l1", "l2", "rmse", "quantile", "mape", "huber", "fair", "poisson", "gamma", "gamma_deviance", "tweedie"),
        *("binary_logloss", "binary_error", "multi_logloss", "multi_error"),
        *("cross_entropy", "cross_entropy_lambda", "kullback_leibler"),
    }
)


def direction_of(metric: str) -> Direction | None:
    """Return the direction of one of LightGBM's metrics by its name in the results; None if it is not known.

    LightGBM 4.7 marks ``r2`` as a metric that is minimised, so that its callback early_stopping keeps the worst round.
    """
    name = metric.split("@")[0]
    return "maximize" if name in _HIGHER_IS_BETTER else "minimize" if name in _LOWER_IS_BETTER else None


def is_forest(params: Mapping[str, Any]) -> bool:
    """Return whether these parameters train a random forest, which predicts the mean of independent trees."""
    return params.get("boosting") in ("rf", "random_forest")


def begins_anew(params: Mapping[str, Any]) -> bool:
    """Return whether each segment (group of rounds) must begin with a booster that is loaded from the model's bytes.

    This is necessary if LightGBM has state that the model's bytes do not contain. Such state is the state of random
    number generators, and the list of features whose cost (parameters ``cegb_*``) was already counted. A training that
    is resumed from a checkpoint would otherwise give another model than a training that was not interrupted.
    """
    fractions = ("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")
    return (
        any(float(params.get(name, 1)) < 1 for name in (*fractions, "feature_fraction", "feature_fraction_bynode"))
        or params.get("boosting") in ("dart", "goss")
        or is_forest(params)
        or objective_of(params) == "rank_xendcg"
        or params.get("data_sample_strategy") == "goss"
        or bool(params.get("extra_trees"))
        or bool(params.get("use_quantized_grad"))
        or any(name.startswith("cegb_") for name in params)
    )


def segment_params(params: Mapping[str, Any], seed: int, index: int) -> dict[str, Any]:
    """Return the parameters of a segment (the rounds between two checkpoints), with seeds for this segment."""
    index = index if begins_anew(params) else 0
    own = {name: params[name] + index for name in _SEEDS if name in params}
    # `categorical_feature` is a parameter of datasets, so it is removed from these parameters of a booster.
    rest = {name: value for name, value in params.items() if name != "categorical_feature"}
    return {**rest, **own, "seed": seed + index}


def check_params(params: Mapping[str, Any], request: TrainRequest) -> tuple[lightgbm.Booster, Directions]:
    """Make LightGBM check the parameters in this process, before any worker starts.

    The check uses two rows and takes 2 ms.

    Returns:
        A booster without trees, and LightGBM's metrics in the order of their evaluation.

    Raises:
        InvalidParamsError: LightGBM refuses a value; the message contains LightGBM's message.
        InvalidArgumentError: A column name contains a space, or LightGBM does not know a metric. Without this check,
            LightGBM would silently ignore an unknown metric.
    """
    if spaced := [column for column in request.input_cols if re.search(r"\s", column)]:
        raise InvalidArgumentError(
            f"the feature name {spaced[0]!r} contains a space, which LightGBM would replace by another character: "
            "rename the column"
        )
    # The check uses the CPU, because the driver's node may have no GPU. All labels are 1, because every objective
    # accepts this label.
    probed = {**params, "device_type": "cpu", "num_machines": 1, "tree_learner": "serial", "num_threads": 1}
    asked: list[str | None] = [*_metrics(probed.pop("metric", None))] or [None]
    categories = probed.pop("categorical_feature", "auto")
    metrics: dict[str, Direction | None] = {}
    try:
        rows = lightgbm.Dataset(
            np.zeros((2, len(request.input_cols))),
            label=np.ones(2),
            group=None if request.group_col is None else [2],
            feature_name=list(request.input_cols),
            params={**probed, "verbosity": -1},
            categorical_feature=categories,
        ).construct()
        for metric in asked:
            named = {} if metric is None else {"metric": metric}
            booster = lightgbm.Booster({**probed, **named, "verbosity": -1}, rows).add_valid(rows, "eval")
            results = booster.eval_valid()
            if metric and NAMES.objective(metric) != "none" and not results:
                raise InvalidArgumentError(
                    f"LightGBM does not know the metric {metric!r}: use a metric of LightGBM, or pass a function as "
                    "custom_metric"
                )
            metrics |= {result[1]: direction_of(result[1]) for result in results}
    except (lightgbm.basic.LightGBMError, ValueError, TypeError) as exc:
        if isinstance(exc, InvalidArgumentError):
            raise
        raise InvalidParamsError(f"LightGBM refuses the parameters: {own_message(exc)}") from exc
    return booster, metrics


def gpu_problem(device: str) -> str | None:
    """Return the reason why LightGBM cannot train on a GPU in this process, with advice for the user; None if GPUs
    work.
    """
    # LightGBM has no function that returns the supported devices. Therefore a small booster is created: LightGBM raises
    # an error if it was not built for the device.
    rows = lightgbm.Dataset(np.arange(100.0).reshape(-1, 1), np.arange(100.0), params={"verbosity": -1})
    try:
        lightgbm.Booster({"device_type": device, "verbosity": -1, "num_threads": 1}, rows)
    except lightgbm.basic.LightGBMError as exc:
        return (
            f'LightGBM refuses device_type="{device}": {own_message(exc).splitlines()[0]} LightGBM\'s wheels on PyPI '
            "have no CUDA: install the build of conda-forge for CUDA, or run `pip install --no-binary lightgbm "
            "--config-settings=cmake.define.USE_CUDA=ON lightgbm` on each node, which needs the CUDA toolkit. The "
            'wheels can train with OpenCL: set params={"device": "gpu"}. To train on CPUs, set use_gpu=False'
        )
    return None


def own_message(exc: BaseException) -> str:
    """Return the message of an error from LightGBM without the C++ source file and line at its end."""
    return re.sub(r" at \S+, line \d+ *\.?\s*$", "", str(exc).strip())


def _metrics(asked: Any) -> list[str]:
    return asked.split(",") if isinstance(asked, str) and asked else list(asked or [])


def resolved(params: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the names of the parameters to LightGBM's canonical names, and refuse unknown parameters and
    contradictions.

    If a parameter is given under two names, LightGBM silently ignores one of the values. shoal therefore refuses two
    names of a parameter with different values.
    """
    from lightgbm.basic import _ConfigAliases

    known: dict[str, list[str]] = _ConfigAliases._get_all_param_aliases()
    names = {alias: name for name, aliases in known.items() for alias in (name, *aliases)}
    found: dict[str, tuple[str, Any]] = {}
    for name, value in params.items():
        canonical = names.get(name)
        if (canonical or name) in _REFUSED:
            raise InvalidArgumentError(f"params must not contain {name}: {_REFUSED[canonical or name]}")
        if canonical is None:
            hint = unknown_hint(name, sorted(names))
            raise InvalidArgumentError(f"LightGBM does not know the parameter {name!r}{hint}")
        add_once(found, canonical, name, value)
    return {canonical: value for canonical, (_, value) in found.items() if value is not None}


def _categories(value: Any, input_cols: Sequence[str]) -> list[str | int]:
    given: list[Any] = value if isinstance(value, list) else str(value).removeprefix("name:").split(",")
    columns: list[str | int] = [
        int(column) if str(column).isdigit() and column not in input_cols else column for column in given
    ]
    for column in columns:
        if column not in input_cols and column not in range(len(input_cols)):
            raise InvalidArgumentError(
                f"categorical_feature contains {column!r}, which is neither the name nor the index of a column in "
                "input_cols"
            )
    return columns
