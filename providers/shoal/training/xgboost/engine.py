"""Run the driver's part of an XGBoost training: check the parameters, and start XGBoost's tracker.

The tracker is the process by which XGBoost's workers find each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.engine import Library, OnAll
from shoal.training.boosting.messages import Prepared, Task
from shoal.training.boosting.model import InitModel
from shoal.training.boosting.params import Directions, seed_in
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.unsupported import inexact_leaves
from shoal.training.boosting.user_code import UserCode
from shoal.training.gang.placement import GangShape
from shoal.training.reporting import say
from shoal.training.timeouts import COLLECTIVE_S
from shoal.training.xgboost.params import (
    NAMES,
    WITHOUT_CUDA,
    approximate,
    check_params,
    gpu_problem,
    has_cuda,
    ignored_weights,
    metrics_of,
    outputs_per_label,
    worker_params,
)
from shoal.training.xgboost.tracker import Tracker

if TYPE_CHECKING:
    from shoal.training.gang.gang import Gang

# Number of times that a worker tries to connect to the tracker and to the other workers; the same as XGBoost's default.
_COLLECTIVE_RETRIES = 3
_CENSORED = "survival:aft"
# With few rows per column, most of the work is finding the bins and the splits, which workers that divide the rows do
# for all columns, and exchanging histograms. Measured with 2 workers: 50 k rows x 1,000 columns take less than half the
# time, 50 k x 200 three quarters, 200 k x 100 as long, and 500 k x 28 more.
_FEWEST_COLUMNS = 100
_ROWS_PER_COLUMN = 1_000
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
    """Implementation of the interface `boosting.engine.Library` for XGBoost; all methods run in the driver."""

    def why_cpu(self) -> str | None:
        """Return the reason why XGBoost trains on CPUs by default, or None if the installed XGBoost was built with
        CUDA."""
        return None if has_cuda() else WITHOUT_CUDA

    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        """Return the reason why XGBoost cannot train on a GPU in this process, with advice for the user; None if GPUs
        work."""
        return gpu_problem()

    def params(
        self, request: TrainRequest, size: GangShape, user_code: UserCode, init_model: InitModel | None = None
    ) -> tuple[dict[str, Any], int]:
        """Check the user's parameters; return the parameters of every worker and the seed of the training.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
            InvalidParamsError: XGBoost refuses a value; the message contains XGBoost's message.
        """
        merged = self.merged(request, user_code.objective)
        objective = str(merged.get("objective"))
        if objective.startswith("rank:") and request.group_col is None:
            raise InvalidArgumentError(
                f'objective="{objective}" ranks rows within groups: set group_col to the column of the groups'
            )
        if (objective == _CENSORED) != bool(request.bound_cols):
            raise InvalidArgumentError(
                f'objective="{_CENSORED}" needs the bounds of the labels: set label_lower_bound_col and '
                "label_upper_bound_col"
                if objective == _CENSORED
                else f'label_lower_bound_col and label_upper_bound_col are only for objective="{_CENSORED}": set this '
                "objective, or remove both"
            )
        params = worker_params(merged, threads=size.threads, gpus=size.gpus_per_worker, workers=size.num_workers)
        outputs = outputs_per_label(params)
        labels = max(1, len(request.label_cols))
        if labels > 1 and outputs > 1:
            raise InvalidArgumentError(
                f"label_cols names {labels} columns, and the parameters ask for {outputs} outputs per label: XGBoost "
                "has no such model, so train one model per label column"
            )
        outputs *= labels
        request.check_margins(outputs)
        seed = seed_in(merged, request.run_config.seed, NAMES)
        learner = check_params(
            {**params, "seed": seed},
            request.input_cols,
            request.categorical_cols,
            num_labels=labels,
            grouped=request.group_col is not None,
            evaluated=bool(request.eval_set),
        )
        if init_model is not None:
            init_model.check_learner(learner["objective"]["name"], outputs, learner["gradient_booster"]["name"])
        weights = request.weights_of_features
        if weights and (advice := ignored_weights(params, weights)):
            say(advice)
        return params, seed

    def metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> Directions:
        """Return XGBoost's own metrics of an eval set, in the order of their evaluation, with their directions."""
        return metrics_of(
            params,
            request.input_cols,
            request.categorical_cols,
            num_labels=max(1, len(request.label_cols)),
            grouped=request.group_col is not None,
        )

    def inexact_leaves(self, params: Mapping[str, Any], num_workers: int) -> str | None:
        """Return a line for the log if workers that divide the rows set the values of leaves only approximately."""
        return inexact_leaves("xgboost", str(params.get("objective")), num_workers)

    def splits_columns(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode, rows: int) -> bool:
        """Return whether the workers divide the columns: the table is wide and fits in memory, and XGBoost then trains
        the same model as one worker."""
        columns = len(request.input_cols)
        is_wide = columns >= _FEWEST_COLUMNS and rows <= _ROWS_PER_COLUMN * columns
        return (
            is_wide
            and rows * columns <= _MOST_VALUES
            and not any((user_code, request.external_memory, request.group_col, request.bound_cols))
            # One worker starts from scores of the quantised rows, which differ from those of the rows.
            and request.init_model is None
            and all(params.get(name, values[0]) in values for name, values in _FOR_COLUMNS.items())
            and params.get("objective") != "survival:cox"
            and "updater" not in params
        )

    def whole_metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> str:
        """Return the metrics whose values XGBoost combines only approximately."""
        return ", ".join(approximate(params.get("eval_metric"), request.group_col is not None, user_code.metrics))

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Start XGBoost's tracker, and return the arguments with which each worker connects to the others.

        A single worker gets no tracker, because a tracker takes half a second to start.
        """
        if gang.shape.num_workers == 1:
            return [{}]
        tracker = gang.sidecar("xgboost", lambda on_death: Tracker(gang.host, gang.shape.num_workers, on_death))
        collective = {**tracker.begin(), "dmlc_timeout": COLLECTIVE_S, "dmlc_retry": _COLLECTIVE_RETRIES}
        return [collective] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Make all workers connect to each other and build their matrices together."""
        return on_all("prepare", [(task,) for task in tasks])
