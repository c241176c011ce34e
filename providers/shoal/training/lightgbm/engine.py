"""Run the driver's part of a LightGBM training: check the parameters, and make rank 0 find the bins for all workers."""

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
from shoal.training.lightgbm.model import objective_line
from shoal.training.lightgbm.params import (
    NAMES,
    RANKING,
    check_params,
    gpu_problem,
    has_metric,
    is_forest,
    objective_of,
    worker_params,
)
from shoal.training.lightgbm.sampling import shares

if TYPE_CHECKING:
    from shoal.training.gang.gang import Gang


class LightGBM(Library):
    """Implementation of the interface `boosting.engine.Library` for LightGBM; all methods run in the driver."""

    functions_tell_direction = True

    def why_cpu(self) -> str | None:
        """Return the reason why LightGBM trains on CPUs by default."""
        return "LightGBM uses GPUs only with use_gpu=True, because its wheels on PyPI have no CUDA"

    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        """Return the reason why LightGBM cannot train on a GPU in this process, with advice for the user; None if GPUs
        work."""
        return gpu_problem(params["device_type"])

    def params(
        self, request: TrainRequest, size: GangShape, user_code: UserCode, init_model: InitModel | None = None
    ) -> tuple[dict[str, Any], int]:
        """Check the user's parameters; return the parameters of every worker and the seed of the training.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
            InvalidParamsError: LightGBM refuses a value; the message contains LightGBM's message.
        """
        if request.external_memory:
            raise InvalidArgumentError(
                "LightGBM does not support external_memory: remove external_memory, or use XGBEstimator"
            )
        merged = self.merged(request, user_code.objective)
        if objective_of(merged) in RANKING and request.group_col is None:
            raise InvalidArgumentError(
                f'objective="{objective_of(merged)}" ranks rows within groups: set group_col to the column of the '
                "groups"
            )
        custom = user_code.objective is not None
        params = worker_params(
            merged,
            request.input_cols,
            threads=size.threads,
            gpus=size.gpus_per_worker,
            workers=size.num_workers,
            categorical_cols=request.categorical_cols,
            custom_objective=custom,
        )
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
        if request.early_stopping_rounds and not (user_code.metrics or has_metric(params)):
            raise InvalidArgumentError(
                "early_stopping_rounds needs a metric: set the parameter metric in params, or pass a custom_metric"
            )
        if is_forest(params) and (custom or request.margin_cols):
            raise InvalidArgumentError(
                'boosting="rf" (random forest) supports neither an objective function nor margins: remove '
                'them, or use boosting="gbdt"'
            )
        outputs = int(params.get("num_class", 1))
        request.check_margins(outputs)
        untrained, _ = check_params(params, request.input_cols, grouped=request.group_col is not None)
        if init_model is not None:
            if is_forest(params):
                raise InvalidArgumentError(
                    'boosting="rf" (random forest) cannot continue from a model, because LightGBM does not support it: '
                    "remove init_model, or set another value for boosting"
                )
            init_model.check_learner(objective_line(untrained), outputs, "gbdt")
        # LightGBM writes the number of rounds into the model's text, but does not use it here.
        params = {**params, "num_iterations": request.n_estimators}
        return params, seed_in(merged, request.run_config.seed, NAMES)

    def metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> Directions:
        """Return LightGBM's own metrics of an eval set, in the order of their evaluation, with their directions."""
        return check_params(params, request.input_cols, grouped=request.group_col is not None)[1]

    def inexact_leaves(self, params: Mapping[str, Any], num_workers: int) -> str | None:
        """Return a line for the log if the workers set the values of leaves only approximately."""
        return inexact_leaves("lightgbm", objective_of(params), num_workers)

    def whole_metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> str:
        """Return all metrics, because a LightGBM worker evaluates only its own rows."""
        return "the metrics of LightGBM"

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Return an empty dict for each rank, because the workers exchange their addresses in :meth:`prepare`."""
        return [{}] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Make rank 0 find the bins from a sample of all workers' rows, and make all workers build their datasets."""
        sample_shares = shares([task.train.shard.rows for task in tasks])
        samples, machines = zip(*on_all("begin", list(zip(tasks, sample_shares, strict=True))), strict=True)
        bins = on_all("bin_sample", [(samples,), *[((),)] * (len(tasks) - 1)])[0]
        # These references are deleted, so that Ray frees the sample before the workers build their datasets.
        del samples
        return on_all("prepare", [(bins, machines)] * len(tasks))
