"""Provide `XGBEstimator`, which trains XGBoost on several nodes with the interface of a local estimator."""

from __future__ import annotations

from shoal.distributors.estimator import BoostingEstimator
from shoal.lazy_imports import xgboost
from shoal.training.boosting.library import library_of
from shoal.training.demand import XGBScalingConfig

__all__ = ["XGBEstimator", "XGBScalingConfig"]


class XGBEstimator(BoostingEstimator["xgboost.Booster", XGBScalingConfig]):
    """Estimator that trains XGBoost on all nodes of a pool.

    Args:
        n_estimators: Number of boosting rounds.
        objective: XGBoost's name of the objective, which may also be given in `params`; the default is
            ``reg:squarederror``. The objective may also be a function ``(predt, dtrain) -> (grad, hess)``. Each worker
            calls the function with the raw scores of its rows, ``[rows]`` or ``[rows, num_class]``, and with its
            ``xgboost.DMatrix``; the function returns two arrays of the scores' shape.
        params: Parameters of XGBoost.
        scaling_config: Number of the workers and resources of each worker; by default one worker per active node.
        callbacks: ``xgboost.callback.TrainingCallback`` objects; every worker gets a copy of them.
        run_config: Pool and limits of the run.
        custom_metric: Function ``(predt, dmatrix) -> (name, value)``, or a list of such functions, evaluated together
            with the metrics in `params`. `predt` are predictions, or raw scores if the objective is a function. Every
            worker calls the function with all rows of an eval set, and the function must return the same value in every
            worker. It does not tell whether a higher value is better, so ``early_stopping_rounds`` of `fit` and a
            search need `direction`.

    Raises:
        InvalidArgumentError: Arguments contradict one another.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors.xgboost import XGBEstimator
        >>> flights = DataConnector.from_parquet("flights/")
        >>> model = XGBEstimator(objective="reg:squarederror").fit(flights, ["distance", "dep_delay"], "arr_delay")
    """

    _framework = "xgboost"
    _scaling = XGBScalingConfig

    def to_sklearn(self) -> xgboost.XGBModel:
        """Return the model as XGBoost's scikit-learn estimator.

        Returns:
            A fitted ``XGBClassifier``, ``XGBRanker`` or ``XGBRegressor``, depending on the objective. If the objective
            is a function: an ``XGBRegressor`` with the same predictions as `predict`.
        """
        return library_of(self.framework).as_sklearn(
            self.get_booster(), self.params, self.n_estimators, self.get_eval_results()
        )
