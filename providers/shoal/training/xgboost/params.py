"""XGBoost's parameters: what the user wrote, checked, and what every worker gets."""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.errors import InvalidArgumentError, TrainingError
from shoal.training.boosting.params import ROUNDS, Names, merge, seed_in
from shoal.training.boosting.user_code import Objective
from shoal.training.xgboost.categories import feature_types

_NAMES = Names(
    "XGBoost",
    # It keeps one of two silently.
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
_OURS = ("nthread", "n_jobs", "seed", "random_state")
_SAMPLING = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")
# Arguments of XGBoost's other interfaces that people carry over, and where they go here.
_ELSEWHERE = {
    "early_stopping_rounds": "give it to fit()",
    "verbose_eval": "give it to fit()",
    "callbacks": "give them to the estimator",
    "enable_categorical": "name the columns in fit(categorical_cols=)",
    "missing": "write missing values as nulls or NaN",
}


def merge_params(
    params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int
) -> dict[str, Any]:
    """Joins what may be said in two places, and refuses contradictions; see `merging.merge`."""
    return merge(params, objective, n_estimators, _NAMES)


def device_of(params: Mapping[str, Any]) -> str | None:
    """The `device` that the parameters ask for; None if they do not.

    Raises:
        InvalidArgumentError: If it names a certain GPU, which is Ray's to choose.
    """
    device = params.get("device")
    if device is None:
        return None
    if ":" in str(device):
        raise InvalidArgumentError(
            f'device="{device}" names a certain GPU, but each worker is given one by Ray: say "cuda"'
        )
    return str(device)


def seed_of(params: Mapping[str, Any], otherwise: int) -> int:
    """The seed that the parameters name; `otherwise` if they do not."""
    return seed_in(params, otherwise, _NAMES)


def is_stochastic(params: Mapping[str, Any]) -> bool:
    """Whether XGBoost draws random numbers while it trains with these parameters."""
    return (
        any(float(params.get(name, 1)) < 1 for name in _SAMPLING)
        or params.get("booster") == "dart"
        or str(params.get("objective")).startswith("rank:")  # pairs may be sampled
    )


def worker_params(params: Mapping[str, Any], *, threads: int, gpus: int) -> dict[str, Any]:
    """What every worker passes to XGBoost, but for the seed.

    Args:
        params: Merged parameters.
        threads: Threads per worker.
        gpus: GPUs per worker.

    Raises:
        InvalidArgumentError: If `params` ask for another number of threads.
    """
    for name in ("nthread", "n_jobs"):
        if params.get(name) not in (None, threads):
            raise InvalidArgumentError(
                f"params hold {name}={params[name]!r}, but the workers have {threads} CPUs each: "
                f"leave it out and set XGBScalingConfig(num_cpu_per_worker={params[name]!r})"
            )
    tree_method = params.get("tree_method", "hist")
    if tree_method not in ("hist", "auto"):
        raise InvalidArgumentError(
            f'tree_method="{tree_method}" cannot train on streamed, quantised data: leave it out, or say "hist"'
        )
    if params.get("booster") == "gblinear":
        raise InvalidArgumentError(
            'booster="gblinear" cannot train on streamed, quantised data: use "gbtree" or "dart"'
        )
    rest = {name: value for name, value in params.items() if name not in _OURS}
    return {**rest, "nthread": threads, "device": "cuda" if gpus else "cpu"}


def check_params(params: Mapping[str, Any], input_cols: Sequence[str], categorical_cols: Sequence[str] = ()) -> None:
    """Has XGBoost itself check the parameters, on two rows, before anything is started (8 ms).

    Args:
        params: What the workers will get.
        input_cols: Feature columns, which constraints may name.
        categorical_cols: Those of them that hold categories.

    Raises:
        TrainingError: With XGBoost's own message, if it refuses a value.
        InvalidArgumentError: If it does not know a parameter, or would not use it; XGBoost alone would only warn.
    """
    import numpy as np
    import xgboost

    # device: whoever checks may have no GPU. Labels 0 and 1 are legal for every objective; nothing is trained.
    probed = {**params, "device": "cpu", "verbosity": 1}
    probed.setdefault("validate_parameters", True)
    rows = xgboost.DMatrix(
        np.zeros((2, len(input_cols)), np.float32),
        label=[0, 1],
        feature_names=list(input_cols),
        feature_types=feature_types(input_cols, categorical_cols),
        enable_categorical=bool(categorical_cols),
        nthread=1,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            config = xgboost.Booster(probed, [rows]).save_config()
        except (xgboost.core.XGBoostError, ValueError, TypeError) as exc:
            raise TrainingError(f"XGBoost refuses the parameters: {own_message(exc)}") from exc
    unused = [name for warning in said for name in _unused(str(warning.message))]
    if unused:
        known = sorted({*_names(json.loads(config)), *_NAMES.aliases})
        raise InvalidArgumentError("; ".join(_describe_unused(name, params, known) for name in unused))


def own_message(exc: BaseException) -> str:
    """XGBoost's message without its stack trace and source lines."""
    text = str(exc).split("Stack trace:")[0].strip()
    return re.sub(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", text)


def _unused(warning: str) -> list[str]:
    found = re.search(r"Parameters: \{(.*?)\} are not used", warning, re.DOTALL)
    return re.findall(r'"([^"]+)"', found.group(1)) if found else []


def _describe_unused(name: str, params: Mapping[str, Any], known: Sequence[str]) -> str:
    if name in _ELSEWHERE:
        return f"{name} is no parameter of XGBoost's learner: {_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, n=2)
    hint = "; did you mean " + " or ".join(near) + "?" if near else ""
    objective = params.get("objective", "reg:squarederror")
    return f"XGBoost knows no parameter {name!r}, or does not use it with objective {objective}{hint}"


def _names(config: Any) -> Iterator[str]:
    """Names of all the settings in a learner's configuration."""
    if isinstance(config, dict):
        for name, value in config.items():
            if isinstance(value, dict | list):
                yield from _names(value)
            else:
                yield name
    elif isinstance(config, list):
        for value in config:
            yield from _names(value)
