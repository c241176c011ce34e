"""`LightGBMEstimator`: distributed LightGBM in the shape that people know from single-process estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors.estimator import BoostingEstimator, checked_rounds
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.user_code import Metric, Objective, UserCode
from shoal.training.lightgbm.params import device_of, merge_params
from shoal.training.run_config import RunConfig
from shoal.training.scaling import LightGBMScalingConfig

if TYPE_CHECKING:
    import lightgbm
    import numpy as np

__all__ = ["LightGBMEstimator", "LightGBMScalingConfig"]


class LightGBMEstimator(BoostingEstimator["lightgbm.Booster"]):
    """Trains LightGBM on all the nodes of a pool.

    Args:
        n_estimators: Rounds of boosting.
        objective: LightGBM's name of the objective, which may stand in `params` instead; default ``regression``. Or a
            function of one's own, ``(preds, dataset) -> (grad, hess)``: of the raw scores ``[rows]``, or ``[rows,
            num_class]``, of a worker's rows, and its ``lightgbm.Dataset`` of them, to arrays of the same shape. There
            is no default metric with it.
        params: LightGBM's own parameters.
        scaling_config: How many workers of which size; by default one per active node.
        callbacks: What ``lightgbm.train`` takes; every worker gets its own copy.
        run_config: Where and under which limits to run.
        custom_metric: Function ``(preds, dataset) -> (name, value, higher_is_better)`` or to a list of such, or a list
            of functions, evaluated beside the metrics in `params`; `preds` are predictions, or raw scores where the
            objective is a function. Every worker calls it with all rows of an eval set, and has to get the same.

    Raises:
        InvalidArgumentError: If arguments contradict one another.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors.lightgbm import LightGBMEstimator
        >>> flights = DataConnector.from_parquet("flights/")
        >>> model = LightGBMEstimator(objective="regression").fit(flights, ["distance", "dep_delay"], "arr_delay")
    """

    _framework = "lightgbm"

    def __init__(
        self,
        n_estimators: int = 100,
        objective: str | Objective | None = None,
        params: Mapping[str, Any] | None = None,
        scaling_config: LightGBMScalingConfig | None = None,
        callbacks: Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        custom_metric: Metric | Sequence[Metric] | None = None,
    ) -> None:
        merged = merge_params(params, objective, checked_rounds(n_estimators))
        user_code = UserCode.of(callbacks, objective, custom_metric)
        super().__init__(n_estimators, merged, scaling_config or LightGBMScalingConfig(), user_code, run_config)

    def to_sklearn(self) -> lightgbm.LGBMModel:
        """The model as LightGBM's scikit-learn estimator.

        Returns:
            A fitted ``LGBMClassifier``, ``LGBMRanker`` or ``LGBMRegressor``, by the objective; with a function as
            objective, an ``LGBMRegressor`` that predicts what `predict` does.
        """
        from shoal.training.lightgbm.sklearn import as_sklearn

        return as_sklearn(self.get_booster(), self.params)

    def _device(self) -> str | None:
        return device_of(self.params)

    def _predict(self, booster: lightgbm.Booster, connector: DataConnector, request: TrainRequest) -> np.ndarray:
        from shoal.training.lightgbm.prediction import predict_booster

        return predict_booster(booster, connector, request.input_cols, base_margin_col=request.base_margin_col)
