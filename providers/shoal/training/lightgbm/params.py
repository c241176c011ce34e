"""LightGBM's parameters: what the user wrote, checked, and what every worker gets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.params import ROUNDS, Names, merge, seed_in
from shoal.training.boosting.user_code import Objective

# Those that matter before LightGBM itself may be imported; it knows the others (see `_resolve`).
_SAME = {
    "objective": ("objective_type", "app", "application", "loss"),
    ROUNDS: (
        *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round", "num_rounds"),
        *("nrounds", "num_boost_round", "max_iter"),
    ),
    "seed": ("random_seed", "random_state"),
    "device_type": ("device",),
}
_SAME_OBJECTIVES = {
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
_NAMES = Names(
    "LightGBM",
    aliases={alias: name for name, aliases in _SAME.items() for alias in aliases},
    objectives={alias: name for name, aliases in _SAME_OBJECTIVES.items() for alias in aliases},
)
# The seeds that LightGBM derives from `seed`; whoever sets one sets it for the first segment.
_SEEDS = ("bagging_seed", "feature_fraction_seed", "drop_seed", "extra_seed", "objective_seed")
RANKING = ("lambdarank", "rank_xendcg")
"""Objectives that rank rows within groups."""
_LEARNERS = ("data", "data_parallel", "voting", "voting_parallel")
# Parameters of its other interfaces that people carry over, and where they go here.
_GANG = "the workers find each other by themselves: leave it out"
_FILES = "it is for LightGBM's command line: leave it out"
_ELSEWHERE = {
    "early_stopping_round": "give early_stopping_rounds to fit()",
    "early_stopping_min_delta": "fit(early_stopping_rounds=) stops at any improvement, however small",
    "first_metric_only": "fit(early_stopping_rounds=) watches the last metric of the last eval set",
    "verbose_eval": "give it to fit()",
    "callbacks": "give them to the estimator",
    "label_column": "give label_col to fit()",
    "weight_column": "give weight_col to fit()",
    "group_column": "give group_col to fit()",
    "ignore_column": "leave it out of input_cols",
    **dict.fromkeys(("num_machines", "local_listen_port", "time_out", "machine_list_filename", "machines"), _GANG),
    **dict.fromkeys(("config", "task", "data", "valid", "input_model", "output_model", "snapshot_freq"), _FILES),
}


def merge_params(
    params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int
) -> dict[str, Any]:
    """Joins what may be said in two places, and refuses contradictions; see `merging.merge`."""
    merged = merge(params, objective, n_estimators, _NAMES)
    return {_NAMES.canonical(name): value for name, value in merged.items()}


def objective_of(params: Mapping[str, Any]) -> str:
    """The objective that merged parameters ask for, under its one name."""
    return str(_NAMES.objective(params.get("objective", "regression")))


def device_of(params: Mapping[str, Any]) -> str | None:
    """The device that merged parameters ask for; None if they do not."""
    device = params.get("device_type")
    return None if device is None else str(device)


def seed_of(params: Mapping[str, Any], otherwise: int) -> int:
    """The seed that the parameters name; `otherwise` if they do not."""
    return seed_in(params, otherwise, _NAMES)


def worker_params(
    params: Mapping[str, Any],
    input_cols: Sequence[str],
    *,
    threads: int,
    gpus: int,
    workers: int,
    categorical_cols: Sequence[str] = (),
    custom_objective: bool = False,
) -> dict[str, Any]:
    """What every worker passes to LightGBM, under LightGBM's own names, but for the seed.

    Args:
        params: Merged parameters.
        input_cols: Feature columns, which `categorical_feature` may name.
        threads: Threads per worker.
        gpus: GPUs per worker.
        workers: Number of workers.
        categorical_cols: Those of the feature columns whose categories shoal encodes.
        custom_objective: Whether a function is the objective.

    Raises:
        InvalidArgumentError: If one is unknown, contradicts another or the scaling config, or asks for what a gang
            cannot do.
    """
    given = _resolve(params)
    if given.get("num_threads") not in (None, 0, threads):
        raise InvalidArgumentError(
            f"params hold num_threads={given['num_threads']!r}, but the workers have {threads} CPUs each: "
            f"leave it out and set LightGBMScalingConfig(num_cpu_per_worker={given['num_threads']!r})"
        )
    learner = str(given.get("tree_learner", "data"))
    if learner not in _LEARNERS and not (learner == "serial" and workers == 1):
        raise InvalidArgumentError(
            f'tree_learner="{learner}" cannot train on sharded rows: leave it out, or say "data" or "voting"'
        )
    if given.get("linear_tree"):
        raise InvalidArgumentError(
            "linear_tree: LightGBM grows such trees in one process only, from rows that are all in memory: leave it out"
        )
    if custom_objective:
        given["objective"] = "none"
    elif objective_of(given) == "none":
        raise InvalidArgumentError(
            f'objective="{given["objective"]}" means a function: give it to the estimator as objective'
        )
    rest = {name: value for name, value in given.items() if name != "seed"}
    if categorical_cols:
        if "categorical_feature" in rest:
            raise InvalidArgumentError(
                "params hold categorical_feature, for columns of codes, and categorical_cols says the same of columns "
                "of any values: name them all in fit(categorical_cols=)"
            )
        rest["categorical_feature"] = list(categorical_cols)
    elif "categorical_feature" in rest:
        rest["categorical_feature"] = _categories(rest["categorical_feature"], input_cols)
    if not rest.get("force_row_wise"):
        # Else LightGBM times both ways and takes the faster, and the model depends on it; this one needs half the
        # memory.
        rest["force_col_wise"] = True
    return {
        "verbosity": -1,
        # The filter counts rows of the sample as if they were all.
        "feature_pre_filter": False,
        **rest,
        "deterministic": True,
        "num_threads": threads,
        "num_machines": workers,
        "tree_learner": "serial" if workers == 1 else learner,
        "device_type": given.get("device_type", "cuda") if gpus else "cpu",
    }


def has_metric(params: Mapping[str, Any]) -> bool:
    """Whether LightGBM evaluates a metric of its own with these parameters: an objective that has a name brings one."""
    named = _metrics(params.get("metric"))
    return any(_NAMES.objective(name) != "none" for name in named) if named else objective_of(params) != "none"


def is_forest(params: Mapping[str, Any]) -> bool:
    """Whether the model is the mean of trees that know nothing of each other, instead of their sum."""
    return params.get("boosting") in ("rf", "random_forest")


def begins_anew(params: Mapping[str, Any]) -> bool:
    """Whether LightGBM, with these parameters, keeps what a model's bytes do not hold: the state of its generators, or
    which features have been paid for. Then each segment has to begin from bytes."""
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
    """What a segment is trained with: one that draws lots draws its own, whatever happened before it.

    Args:
        params: What `worker_params` made.
        seed: The first segment's seed.
        index: Number of the segment.
    """
    index = index if begins_anew(params) else 0
    own = {name: params[name] + index for name in _SEEDS if name in params}
    rest = {name: value for name, value in params.items() if name != "categorical_feature"}  # the dataset's
    return {**rest, **own, "seed": seed + index}


def check_params(params: Mapping[str, Any], input_cols: Sequence[str], *, grouped: bool = False) -> None:
    """Has LightGBM itself check the parameters, on two rows, before anything is started (2 ms).

    Args:
        params: What the workers will get.
        input_cols: Feature columns.
        grouped: Whether the rows are in groups.

    Raises:
        TrainingError: With LightGBM's own message, if it refuses a value.
        InvalidArgumentError: If it does not know a metric, which it would leave out without a word.
    """
    import lightgbm
    import numpy as np

    if spaced := [column for column in input_cols if re.search(r"\s", column)]:
        raise InvalidArgumentError(
            f"LightGBM's feature names hold no spaces, so that {spaced[0]!r} would come back under another name: "
            "rename the column"
        )
    # device_type: whoever checks may have no GPU. A label of 1 is legal for every objective; nothing is trained.
    probed = {**params, "device_type": "cpu", "num_machines": 1, "tree_learner": "serial", "num_threads": 1}
    asked: list[str | None] = [*_metrics(probed.pop("metric", None))] or [None]
    categories = probed.pop("categorical_feature", "auto")
    try:
        rows = lightgbm.Dataset(
            np.zeros((2, len(input_cols))),
            label=np.ones(2),
            group=[2] if grouped else None,
            feature_name=list(input_cols),
            params={**probed, "verbosity": -1},
            categorical_feature=categories,
        ).construct()
        for metric in asked:
            named = {} if metric is None else {"metric": metric}
            booster = lightgbm.Booster({**probed, **named, "verbosity": -1}, rows).add_valid(rows, "eval")
            if metric and _NAMES.objective(metric) != "none" and not booster.eval_valid():
                raise InvalidArgumentError(f"LightGBM knows no metric {metric!r}")
    except (lightgbm.basic.LightGBMError, ValueError, TypeError) as exc:
        if isinstance(exc, InvalidArgumentError):
            raise
        raise TrainingError(f"LightGBM refuses the parameters: {own_message(exc)}") from exc


def own_message(exc: BaseException) -> str:
    """LightGBM's message without its source lines."""
    return re.sub(r" at \S+, line \d+ *\.?\s*$", "", str(exc).strip())


def _metrics(asked: Any) -> list[str]:
    return asked.split(",") if isinstance(asked, str) and asked else list(asked or [])


def _resolve(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters under LightGBM's own names, of each of which it keeps one of two silently."""
    from lightgbm.basic import _ConfigAliases

    known: dict[str, list[str]] = _ConfigAliases._get_all_param_aliases()
    names = {alias: name for name, aliases in known.items() for alias in (name, *aliases)}
    found: dict[str, tuple[str, Any]] = {}
    for name, value in params.items():
        canonical = names.get(name)
        if (canonical or name) in _ELSEWHERE:
            raise InvalidArgumentError(f"params hold {name}: {_ELSEWHERE[canonical or name]}")
        if canonical is None:
            near = difflib.get_close_matches(name, sorted(names), n=2)
            hint = "; did you mean " + " or ".join(near) + "?" if near else ""
            raise InvalidArgumentError(f"LightGBM knows no parameter {name!r}{hint}")
        if canonical in found and found[canonical][1] != value:
            other, theirs = found[canonical]
            raise InvalidArgumentError(
                f"params hold {other}={theirs!r} and {name}={value!r}, which are one parameter: leave one out"
            )
        found[canonical] = (name, value)
    return {canonical: value for canonical, (_, value) in found.items() if value is not None}


def _categories(value: Any, input_cols: Sequence[str]) -> list[str | int]:
    given: list[Any] = value if isinstance(value, list) else str(value).removeprefix("name:").split(",")
    columns: list[str | int] = [
        int(column) if str(column).isdigit() and column not in input_cols else column for column in given
    ]
    for column in columns:
        if column not in input_cols and column not in range(len(input_cols)):
            raise InvalidArgumentError(f"categorical_feature names {column!r}, which is not among the input_cols")
    return columns
