"""Provide `LightGBMEstimator`, which trains LightGBM on several nodes with the interface of a local estimator."""

from __future__ import annotations

from shoal.distributors.estimator import BoostingEstimator
from shoal.lazy_imports import lightgbm
from shoal.training.boosting.library import library_of
from shoal.training.demand import LightGBMScalingConfig

__all__ = ["LightGBMEstimator", "LightGBMScalingConfig"]


class LightGBMEstimator(BoostingEstimator["lightgbm.Booster", LightGBMScalingConfig]):
    """Estimator that trains LightGBM on all nodes of a pool.

    Args:
        n_estimators: Number of boosting rounds.
        objective: LightGBM's name of the objective, which may also be given in `params`; the default is ``regression``.
            The objective may also be a function ``(preds, dataset) -> (grad, hess)``. Each worker calls the function
            with the raw scores of its rows, ``[rows]`` or ``[rows, num_class]``, and with its ``lightgbm.Dataset``; the
            function returns two arrays of the scores' shape. With a function there is no default metric.
        params: Parameters of LightGBM.
        scaling_config: Number of the workers and resources of each worker; by default one worker per active node.
        callbacks: Callbacks of ``lightgbm.train``; every worker gets a copy of them.
        run_config: Pool and limits of the run.
        custom_metric: Function ``(preds, dataset) -> (name, value, higher_is_better)``, or a list of such functions,
            evaluated in addition to the metrics in `params`. A metric function may also return a list of tuples (name,
            value, higher_is_better). `preds` are predictions, or raw scores if the objective is a function. Every
            worker calls the function with all rows of an eval set, and the function must return the same value in every
            worker.

    Raises:
        InvalidArgumentError: Arguments contradict one another.

    Example:
        >>> from shoal.data import DataConnector
        >>> from shoal.distributors.lightgbm import LightGBMEstimator
        >>> flights = DataConnector.from_parquet("flights/")
        >>> model = LightGBMEstimator(objective="regression").fit(flights, ["distance", "dep_delay"], "arr_delay")
    """

    _framework = "lightgbm"
    _scaling = LightGBMScalingConfig

    def to_sklearn(self) -> lightgbm.LGBMModel:
        """Return the model as LightGBM's scikit-learn estimator.

        Returns:
            A fitted ``LGBMClassifier``, ``LGBMRanker`` or ``LGBMRegressor``, depending on the objective. If the
            objective is a function: an ``LGBMRegressor`` with the same predictions as `predict`.
        """
        return library_of(self.framework).as_sklearn(
            self.get_booster(), self.params, self.n_estimators, self.get_eval_results()
        )
