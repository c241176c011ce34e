"""`XGBEstimator`: distributed XGBoost in the shape that people know from single-process estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors.estimator import BoostingEstimator, checked_rounds
from shoal.training.boosting.request import TrainRequest
from shoal.training.boosting.user_code import Metric, Objective, UserCode
from shoal.training.run_config import RunConfig
from shoal.training.scaling import XGBScalingConfig
from shoal.training.xgboost.params import device_of, merge_params

if TYPE_CHECKING:
    import numpy as np
    import xgboost

__all__ = ["XGBEstimator", "XGBScalingConfig"]


class XGBEstimator(BoostingEstimator["xgboost.Booster"]):
    """Trains XGBoost on all the nodes of a pool.

    Args:
        n_estimators: Rounds of boosting.
        objective: XGBoost's name of the objective, which may stand in `params` instead; default ``reg:squarederror``.
            Or a function of one's own, ``(predt, dtrain) -> (grad, hess)``: of the raw scores ``[rows]``, or ``[rows,
            num_class]``, of a worker's rows, and its ``xgboost.DMatrix`` of them, to arrays of the same shape.
        params: XGBoost's own parameters.
        scaling_config: How many workers of which size; by default one per active node.
        callbacks: ``xgboost.callback.TrainingCallback`` objects; every worker gets its own copy.
        run_config: Where and under which limits to run.
        custom_metric: Function ``(predt, dmatrix) -> (name, value)``, or a list of them, evaluated beside the metrics
            in `params`; `predt` are predictions, or raw scores where the objective is a function. Every worker calls it
            with its own part of an eval set, and XGBoost takes the mean of the workers' values: as the parts are even,
            that is as good as the value on all rows of what is itself a mean over rows, and near it for the rest.
            ``early_stopping_rounds`` of `fit` takes less for better unless its name begins with ``auc``, ``map``,
            ``ndcg`` or ``pre``, as XGBoost does.

    Raises:
        InvalidArgumentError: If arguments contradict one another.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors.xgboost import XGBEstimator
        >>> flights = DataConnector.from_parquet("flights/")
        >>> model = XGBEstimator(objective="reg:squarederror").fit(flights, ["distance", "dep_delay"], "arr_delay")
    """

    _framework = "xgboost"

    def __init__(
        self,
        n_estimators: int = 100,
        objective: str | Objective | None = None,
        params: Mapping[str, Any] | None = None,
        scaling_config: XGBScalingConfig | None = None,
        callbacks: Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        custom_metric: Metric | Sequence[Metric] | None = None,
    ) -> None:
        merged = merge_params(params, objective, checked_rounds(n_estimators))
        user_code = UserCode.of(callbacks, objective, custom_metric)
        super().__init__(n_estimators, merged, scaling_config or XGBScalingConfig(), user_code, run_config)

    def to_sklearn(self) -> xgboost.XGBModel:
        """The model as XGBoost's scikit-learn estimator.

        Returns:
            A fitted ``XGBClassifier``, ``XGBRanker`` or ``XGBRegressor``, by the objective; with a function as
            objective, an ``XGBRegressor`` that predicts what `predict` does.
        """
        from shoal.training.xgboost.sklearn import as_sklearn

        return as_sklearn(self.get_booster(), self.params)

    def _device(self) -> str | None:
        return device_of(self.params)

    def _predict(self, booster: xgboost.Booster, connector: DataConnector, request: TrainRequest) -> np.ndarray:
        from shoal.training.xgboost.prediction import predict_booster

        return predict_booster(booster, connector, request.input_cols, base_margin_col=request.base_margin_col)
