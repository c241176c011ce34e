"""`LightGBMEstimator`: distributed LightGBM in the shape that people know from single-process estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors.fitting import BoostingEstimator, checked_rounds
from shoal.training.lightgbm.params import device_of, merge_params
from shoal.training.request import TrainRequest
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
        objective: LightGBM's name of the objective; it may stand in `params` instead. LightGBM's default:
            ``regression``.
        params: LightGBM's own parameters.
        scaling_config: How many workers of which size; by default one per active node.
        callbacks: What ``lightgbm.train`` takes; every worker gets its own copy.
        run_config: Where and under which limits to run.

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
        objective: str | None = None,
        params: Mapping[str, Any] | None = None,
        scaling_config: LightGBMScalingConfig | None = None,
        callbacks: Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        merged = merge_params(params, objective, checked_rounds(n_estimators))
        super().__init__(n_estimators, merged, scaling_config or LightGBMScalingConfig(), callbacks, run_config)

    def to_sklearn(self) -> lightgbm.LGBMModel:
        """The model as LightGBM's scikit-learn estimator.

        Returns:
            A fitted ``LGBMClassifier`` or ``LGBMRegressor``, by the objective.
        """
        from shoal.training.lightgbm.sklearn import as_sklearn

        return as_sklearn(self.get_booster(), self.params)

    def _device(self) -> str | None:
        return device_of(self.params)

    def _predict(self, booster: lightgbm.Booster, connector: DataConnector, request: TrainRequest) -> np.ndarray:
        from shoal.training.lightgbm.prediction import predict_booster

        return predict_booster(booster, connector, request.input_cols, base_margin_col=request.base_margin_col)
