"""The driver's side of an XGBoost training: check the parameters, and start the tracker that connects the workers."""

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

# How much longer than its peers a worker may take between two collective steps. XGBoost's default is half an hour. The
# lifelines detect a dead worker within seconds, so this limit matters only for a live worker that does not progress,
# for example because a read from storage hangs. Shard sizes differ by at most 1 %, so a healthy worker never needs ten
# minutes.
_COLLECTIVE_SECONDS = 600
# Number of attempts of a worker to connect to the tracker and to its peers; XGBoost's default.
_COLLECTIVE_RETRIES = 3


class XGBoost:
    """The implementation of `boosting.engine.Library` for XGBoost."""

    package = "xgboost"
    extra = "xgboost"
    worker = "shoal.training.xgboost.worker"

    def device(self, request: TrainRequest) -> str | None:
        """Return the device in the parameters, or None if they contain none."""
        return device_of(self._merged(request))

    def params(self, request: TrainRequest, size: GangSize, user_code: UserCode) -> tuple[dict[str, Any], int]:
        """Return the parameters of every worker and the first segment's seed.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
            TrainingError: XGBoost refuses a value; the message contains XGBoost's message.
        """
        merged = self._merged(request, user_code.objective)
        objective = str(merged.get("objective"))
        if objective.startswith("rank:") and request.group_col is None:
            raise InvalidArgumentError(
                f'objective="{objective}" ranks rows within groups: set group_col to the column of the groups'
            )
        params = worker_params(merged, threads=size.threads, gpus=size.gpus_per_worker)
        seed = seed_of(merged, request.run_config.seed)
        check_params({**params, "seed": seed}, request.input_cols, request.categorical_cols)
        return params, seed

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Return the arguments for XGBoost's collective, by rank, from a new tracker."""
        tracker = gang.sidecar("xgboost", lambda on_death: Tracker(gang.host, gang.shape.num_workers, on_death))
        collective = {**tracker.begin(), "dmlc_timeout": _COLLECTIVE_SECONDS, "dmlc_retry": _COLLECTIVE_RETRIES}
        return [collective] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Let the workers build their matrices in one collective step."""
        return on_all("prepare", tasks)

    def _merged(self, request: TrainRequest, objective: Objective | None = None) -> dict[str, Any]:
        return merge_params(request.params, objective, request.n_estimators)
