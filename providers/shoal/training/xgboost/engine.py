"""XGBoost on a gang, the driver's side: its parameters, and the tracker by which the workers find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.task import Prepared, Task
from shoal.training.boosting.user_code import Objective, UserCode
from shoal.training.scaling import GangSize
from shoal.training.xgboost.params import check_params, device_of, merge_params, seed_of, worker_params
from shoal.training.xgboost.tracker import Tracker

if TYPE_CHECKING:
    from shoal.training.boosting.engine import OnAll
    from shoal.training.gang.gang import Gang

# How much longer than its peers a worker may take between two collective steps. XGBoost waits half an hour by default;
# deaths are noticed by the lifelines within seconds, so this is only for a worker that lives and yet does nothing, such
# as a read from storage that hangs. Shards are even within 1 %, so ten minutes are far more than an honest worker
# needs.
_COLLECTIVE_SECONDS = 600
# How often a worker tries to connect to the tracker and to its peers; XGBoost's own default.
_COLLECTIVE_RETRIES = 3


class XGBoost:
    """The library, as `boosting` drives it."""

    package = "xgboost"
    extra = "xgboost"
    worker = "shoal.training.xgboost.worker"

    def device(self, request: TrainRequest) -> str | None:
        """The device that the parameters ask for; None if they do not."""
        return device_of(self._merged(request))

    def params(self, request: TrainRequest, size: GangSize, user_code: UserCode) -> tuple[dict[str, Any], int]:
        """What every worker is given, and the first segment's seed.

        Raises:
            InvalidArgumentError: If arguments contradict one another, or a parameter is unknown.
            TrainingError: If XGBoost refuses a value, with its message.
        """
        merged = self._merged(request, user_code.objective)
        objective = str(merged.get("objective"))
        if objective.startswith("rank:") and request.group_col is None:
            raise InvalidArgumentError(
                f'objective="{objective}" ranks rows within groups: name their column, group_col'
            )
        params = worker_params(merged, threads=size.threads, gpus=size.gpus_per_worker)
        seed = seed_of(merged, request.run_config.seed)
        check_params({**params, "seed": seed}, request.input_cols, request.categorical_cols)
        return params, seed

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """How the workers find each other, by rank."""
        tracker = gang.sidecar("xgboost", lambda on_death: Tracker(gang.host, gang.shape.num_workers, on_death))
        collective = {**tracker.begin(), "dmlc_timeout": _COLLECTIVE_SECONDS, "dmlc_retry": _COLLECTIVE_RETRIES}
        return [collective] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Have the workers build their matrices, which they do together."""
        return on_all("prepare", tasks)

    def _merged(self, request: TrainRequest, objective: Objective | None = None) -> dict[str, Any]:
        return merge_params(request.params, objective, request.n_estimators)
