"""`XGBEstimator`: distributed XGBoost in the shape that people know from single-process estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors.fitting import BoostingEstimator, checked_rounds
from shoal.training.request import TrainRequest
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
        objective: XGBoost's name of the objective; it may stand in `params` instead. XGBoost's default:
            ``reg:squarederror``.
        params: XGBoost's own parameters.
        scaling_config: How many workers of which size; by default one per active node.
        callbacks: ``xgboost.callback.TrainingCallback`` objects; every worker gets its own copy.
        run_config: Where and under which limits to run.

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
        objective: str | None = None,
        params: Mapping[str, Any] | None = None,
        scaling_config: XGBScalingConfig | None = None,
        callbacks: Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        merged = merge_params(params, objective, checked_rounds(n_estimators))
        super().__init__(n_estimators, merged, scaling_config or XGBScalingConfig(), callbacks, run_config)

    def to_sklearn(self) -> xgboost.XGBModel:
        """The model as XGBoost's scikit-learn estimator.

        Returns:
            A fitted ``XGBClassifier``, ``XGBRanker`` or ``XGBRegressor``, by the objective.
        """
        from shoal.training.xgboost.sklearn import as_sklearn

        return as_sklearn(self.get_booster(), self.params)

    def _device(self) -> str | None:
        return device_of(self.params)

    def _predict(self, booster: xgboost.Booster, connector: DataConnector, request: TrainRequest) -> np.ndarray:
        from shoal.training.xgboost.prediction import predict_booster

        return predict_booster(booster, connector, request.input_cols, base_margin_col=request.base_margin_col)
