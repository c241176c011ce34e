"""Table of the parameters that a library cannot train with, or not in several workers, and the check of the table.

The table in docs/training.md is written from `UNSUPPORTED`: run ``python -m tests.support.unsupported_table``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.request import Framework

_ONE_WORKER = "train with one worker (num_workers=1)"
_QUANTISED = "it cannot train on quantised data (histogram bins), which shoal uses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A parameter with which a library cannot train, or trains another model in several workers than in one.

    Args:
        name: Canonical name of the parameter.
        values: The unsupported values; empty: every value that switches the parameter on.
        allowed: Values that are supported although `values` is empty.
        only_several_workers: Whether one worker can train with the parameter, and only several workers cannot.
        reason: Reason, as the part of a sentence after "because".
        remedy: Advice in the imperative.
    """

    name: str
    values: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    only_several_workers: bool = True
    reason: str
    remedy: str = _ONE_WORKER

    def given(self, value: Any) -> Any:
        """Return the unsupported part of a parameter's value: the value, one item of a list, or None."""
        if not self.values:
            return None if value in (None, "", False, 0, [], *self.allowed) else value
        items = value if isinstance(value, list) else str(value).split(",")
        return next((item for item in items if _without_argument(item) in self.values), None)


UNSUPPORTED: Mapping[Framework, tuple[Unsupported, ...]] = {
    "xgboost": (
        Unsupported(
            name="objective",
            values=("survival:cox",),
            reason="the loss of a row sums over all rows at risk, and each worker sums over its own rows only",
        ),
        Unsupported(
            name="eval_metric",
            values=("cox-nloglik", "ams"),
            reason="XGBoost cannot evaluate this metric in several workers",
            remedy=f"{_ONE_WORKER}, or use another metric",
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
    ),
    "lightgbm": (
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
            remedy=f'{_ONE_WORKER}, remove tree_learner, or set it to "data" or "voting"',
        ),
        Unsupported(
            name="interaction_constraints",
            reason="LightGBM crashes with it in several workers",
            remedy=f"{_ONE_WORKER}, or use XGBEstimator",
        ),
        Unsupported(
            name="monotone_constraints_method",
            values=("intermediate", "advanced"),
            reason='LightGBM replaces it by "basic" in several workers',
            remedy=f'{_ONE_WORKER}, or set it to "basic"',
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
            reason="LightGBM keeps account of the rows for which a feature was used per worker, and trains another "
            "model",
        ),
        Unsupported(
            name="cegb_penalty_feature_coupled",
            reason="each worker then grows other trees, because LightGBM keeps account of the used features per worker",
        ),
    ),
}
"""The table, by library. Each remedy was tried: for example, one worker trains the model of the plain library."""

_QUANTILE_LEAVES: Mapping[Framework, tuple[str, ...]] = {
    "xgboost": ("reg:absoluteerror", "reg:quantileerror"),
    "lightgbm": ("regression_l1", "quantile", "mape"),
}


def refuse_unsupported(library: Framework, params: Mapping[str, Any], num_workers: int) -> None:
    """Raise InvalidArgumentError if the library cannot train with a parameter, or not in so many workers.

    Raises:
        InvalidArgumentError: A parameter is in the table; the message contains the reason and the remedy.
    """
    for entry in UNSUPPORTED[library]:
        if entry.only_several_workers and num_workers == 1:
            continue
        value = entry.given(params.get(entry.name))
        if value is None:
            continue
        given = f'"{value}"' if isinstance(value, str) else value
        where = f"with {num_workers} workers" if entry.only_several_workers else "in shoal"
        raise InvalidArgumentError(
            f"{entry.name}={given} is not supported {where}, because {entry.reason}: {entry.remedy}"
        )


def inexact_leaves(library: Framework, objective: str, num_workers: int) -> str | None:
    """Return a line for the log if the workers set the values of leaves only approximately; None if they are exact."""
    if num_workers == 1 or objective not in _QUANTILE_LEAVES[library]:
        return None
    return (
        f'objective "{objective}" with {num_workers} workers: the value of a leaf is the mean of the workers\' own '
        "quantiles, not the quantile of all rows, so the model differs from that of one worker. For the exact values, "
        f"{_ONE_WORKER}"
    )


def _without_argument(value: Any) -> str:
    """Return a name without its argument, such as "ams" for "ams@0.15"."""
    return str(value).strip().partition("@")[0]
