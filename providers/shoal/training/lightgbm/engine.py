"""LightGBM on a gang, the driver's side: its parameters, and what the workers have to agree on before they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.task import Prepared, Task
from shoal.training.boosting.user_code import Objective, UserCode
from shoal.training.lightgbm.messages import Agreed, Offer, Opening
from shoal.training.lightgbm.params import (
    RANKING,
    check_params,
    device_of,
    has_metric,
    is_forest,
    merge_params,
    objective_of,
    seed_of,
    worker_params,
)
from shoal.training.lightgbm.sampling import shares
from shoal.training.scaling import GangSize

if TYPE_CHECKING:
    from shoal.training.boosting.engine import OnAll
    from shoal.training.gang.gang import Gang


class LightGBM:
    """The library, as `boosting` drives it."""

    package = "lightgbm"
    extra = "lightgbm"
    worker = "shoal.training.lightgbm.worker"

    def device(self, request: TrainRequest) -> str | None:
        """The device that the parameters ask for; None if the scaling config decides.

        Not the nodes: PyPI's wheels of LightGBM cannot use CUDA, so GPUs are used only where they are asked for.
        """
        device = device_of(self._merged(request))
        return "cpu" if device is None and request.scaling_config.use_gpu is None else device

    def params(self, request: TrainRequest, size: GangSize, user_code: UserCode) -> tuple[dict[str, Any], int]:
        """What every worker is given, and the first segment's seed.

        Raises:
            InvalidArgumentError: If arguments contradict one another, or a parameter is unknown.
            TrainingError: If LightGBM refuses a value, with its message.
        """
        if request.external_memory:
            raise InvalidArgumentError("LightGBM has no external memory: leave it out, or use XGBEstimator")
        merged = self._merged(request, user_code.objective)
        if objective_of(merged) in RANKING and request.group_col is None:
            raise InvalidArgumentError(
                f'objective="{objective_of(merged)}" ranks rows within groups: name their column, group_col'
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
                'early_stopping_rounds does not go with boosting="dart": it changes earlier trees, so that the best '
                "round's model is gone when it is known"
            )
        if request.early_stopping_rounds and not (user_code.metrics or has_metric(params)):
            raise InvalidArgumentError(
                "early_stopping_rounds needs a metric to watch: name one in params, or give a custom_metric"
            )
        if is_forest(params) and (custom or request.base_margin_col is not None):
            raise InvalidArgumentError(
                'boosting="rf" grows all its trees from one start, and takes neither a function as objective nor a '
                'base_margin_col: use "gbdt"'
            )
        check_params(params, request.input_cols, grouped=request.group_col is not None)
        return params, seed_of(merged, request.run_config.seed)

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Nothing: the workers' ports are theirs to choose, when they prepare."""
        return [{}] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Have the workers sample their rows, and build their datasets in the bins of all their samples."""
        import numpy as np
        import ray

        sample_shares = shares([task.train.shard.rows for task in tasks])
        offers: list[Offer] = on_all("begin", [Opening(*each) for each in zip(tasks, sample_shares, strict=True)])
        # Stored once, not once per worker.
        sample = ray.put(np.concatenate([offer.sample for offer in offers]))
        agreed = Agreed(sample, tuple(offer.address for offer in offers))
        return on_all("prepare", [agreed] * len(tasks))

    def _merged(self, request: TrainRequest, objective: Objective | None = None) -> dict[str, Any]:
        return merge_params(request.params, objective, request.n_estimators)
