"""Provide the base class of the XGBoost and LightGBM estimators, which take any kind of dataset.

An estimator returns the model as an object of the boosting library itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Generic, Never, TypeVar

from shoal.boosting_libraries import Framework
from shoal.data.connector import DataConnector
from shoal.data.frames import is_frame
from shoal.distributors.call import Call, SubmittedCall, run_call, same_arguments, submitted
from shoal.errors import InvalidArgumentError, shown
from shoal.jobs.kind import call_of
from shoal.jobs.spec import NOT_STORED
from shoal.kinds.training.spec import JobSpec
from shoal.lazy_imports import np
from shoal.training.boosting.library import import_package, library_of
from shoal.training.boosting.params import Direction, Metric, Objective, UserCode
from shoal.training.boosting.request import TrainResult
from shoal.training.demand import ScalingConfig, gpu_wish
from shoal.training.run_config import RunConfig
from shoal.training.tracking import absolute_model, check_model_version

Dataset = Any
"""Type of a dataset argument: a `DataConnector`, a `ShardedDataConnector` or a DataFrame."""

InitialModel = Any
"""Type of the model from which a training continues: a booster or estimator of the library, a path or an MLflow URI."""

BoosterT = TypeVar("BoosterT")
ScalingT = TypeVar("ScalingT", bound=ScalingConfig)


class BoostingEstimator(Generic[BoosterT, ScalingT]):
    """Base class of estimators that train with XGBoost or LightGBM on all nodes of a pool.

    Raises:
        InvalidArgumentError: Arguments contradict each other, or an argument is unknown.
    """

    _framework: ClassVar[Framework]
    _scaling: ClassVar[type[ScalingConfig]]

    def __init__(
        self,
        n_estimators: int = 100,
        objective: str | Objective | None = None,
        params: Mapping[str, Any] | None = None,
        scaling_config: ScalingT | None = None,
        callbacks: Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        custom_metric: Metric | Sequence[Metric] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise InvalidArgumentError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}: correct the name, or give a "
                f"parameter of the library as params={shown(unknown)}"
            )
        library = library_of(self._framework)
        self.framework: Framework = self._framework
        if isinstance(n_estimators, bool) or not isinstance(n_estimators, int) or n_estimators < 1:
            raise InvalidArgumentError(f"n_estimators must be a positive whole number, not {n_estimators!r}")
        self.n_estimators = n_estimators
        self.params: dict[str, Any] = library.merge_params(params, objective, n_estimators)
        self.scaling_config = scaling_config or self._scaling()
        self.user_code = UserCode.of(callbacks, objective, custom_metric)
        self.run_config = run_config or RunConfig()
        gpu_wish(self.scaling_config, library.device_of(self.params))
        self._result: TrainResult | None = None
        self._booster: BoosterT | None = None
        self._input_cols: tuple[str, ...] = ()
        self._base_margin_cols: tuple[str, ...] = ()

    def fit(
        self,
        dataset: Dataset,
        input_cols: Sequence[str],
        label_col: str | None = None,
        eval_set: Dataset | Mapping[str, Dataset] | None = None,
        verbose_eval: bool | int | None = None,
        *,
        label_cols: Sequence[str] = (),
        label_lower_bound_col: str | None = None,
        label_upper_bound_col: str | None = None,
        weight_col: str | None = None,
        group_col: str | None = None,
        base_margin_col: str | None = None,
        base_margin_cols: Sequence[str] = (),
        early_stopping_rounds: int | None = None,
        direction: Direction | None = None,
        missing: float | None = None,
        feature_weights: Mapping[str, float] | Sequence[float] = (),
        external_memory: bool | None = None,
        categorical_cols: Sequence[str] = (),
        init_model: InitialModel = None,
        xgb_model: InitialModel = None,
    ) -> BoosterT:
        """Train a model on all workers together, and return the model. Every row of the dataset goes to exactly one
        worker.

        Args:
            dataset: Rows to train on: a connector of either kind, or a pandas DataFrame.
            input_cols: Names of the feature columns. Feature columns must be numeric or boolean, except
                `categorical_cols`. Nulls count as missing values.
            label_col: Name of the label column, which must have no nulls. It may be omitted only with bounds or
                `label_cols`.
            eval_set: Rows on which the model is evaluated after each round, with the name "eval". A dict gives several
                such datasets by name.
            verbose_eval: How often the metrics are printed in this process. True: after every round; a number n: after
                every n rounds.
            label_cols: Names of several label columns, for one model with an output per column. LightGBM does not
                support them.
            label_lower_bound_col: Name of the column with the lower bound of each label, at least 0, for XGBoost's
                objective ``survival:aft``.
            label_upper_bound_col: Name of the column with the upper bound of each label: infinity if the label is only
                known to be larger than the lower bound.
            weight_col: Name of the column with the weight of each row. With XGBoost and `group_col`, all rows of a
                group must have the same weight.
            group_col: Name of the column that assigns rows to groups, such as queries, for ranking. The rows of a group
                must be adjacent in the dataset; all rows of a group go to the same worker.
            base_margin_col: Name of the column with the margin (raw score) of each row from which boosting starts.
            base_margin_cols: Names of the columns with the margins, one per class, for a model with several classes.
            early_stopping_rounds: Number of rounds without an improvement after which the training stops. Only the last
                metric of the last eval set counts; a `custom_metric` comes after the library's own metrics. LightGBM
                skips the training set if it is one of the eval sets.
            direction: Whether early stopping minimizes (``"minimize"``) or maximizes (``"maximize"``) this metric.
                Default: as the metric demands. Only a `custom_metric` of XGBoost, which does not tell it, needs this.
            missing: Value of the numeric features that counts as missing, as nulls and NaN do, such as -999. The model
                stores the value for predictions. LightGBM does not support it.
            feature_weights: Weights with which XGBoost samples features, if a parameter ``colsample_*`` is below 1: one
                per feature, or a mapping from names to weights; all other features then have the weight 1.
            external_memory: Whether the workers keep the quantised rows on disk (True) or in memory (False). By
                default, rows are kept on disk only if they do not fit in memory. LightGBM does not support True.
            categorical_cols: Names of the feature columns whose values are categories: text, whole numbers or booleans.
                The model stores the categories; any other value in an eval set or a prediction counts as missing.
            init_model: Model from which the training continues with `n_estimators` further rounds: a booster or a
                fitted scikit-learn estimator of the library, the path of a model file, or an MLflow URI
                (``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...``). The model needs the same features,
                categorical columns and objective; its categories are used.
            xgb_model: XGBoost's name of `init_model`, only for `XGBEstimator`.

        Returns:
            The model as the library's own booster, with `input_cols` as its feature names.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown. If the library refuses a
                parameter (`InvalidParamsError`), the error is a TrainingError, too.
            DataError: The data cannot be used. The message names the file, column and row group, as far as they are
                known.
            CapacityError: The active nodes have too few CPUs or GPUs.
            TrainingError: The training failed. The message names the rank that failed first, and the notes contain the
                traceback of each rank that failed.
            WorkerLostError: Workers or their nodes were lost more often than `max_restarts` allows.
            JobFailedError: The call ran as a job on a pool, and the job failed, for whatever reason. The error is a
                TrainingError, too. Its message ends with the cause, and its notes contain the traceback of each rank
                that failed.
            JobCancelledError: The call ran as a job on a pool, and the job was cancelled.
        """
        arguments = dict(locals())  # the call's arguments, as no other name exists yet
        del arguments["self"]
        self._result = self._booster = None
        return run_call(partial(self._call, **arguments))

    @same_arguments(fit)
    def submit(self, **arguments: Any) -> SubmittedCall[BoosterT]:
        """Train a model as a job on all workers together, and return without waiting for the job.

        The job goes on when this process ends. The arguments are those of `fit`. A DataFrame is copied to files, which
        are kept until the job has ended.

        Returns:
            Handle of the call, whose ``result()`` returns the same as `fit`. When ``result()`` has returned, this
            estimator's other methods, such as `get_booster` and `predict`, use the new model.

        Raises:
            InvalidArgumentError: An argument is not legal, as in `fit`; or this process is connected to a Ray cluster,
                where calls do not run as jobs.
            DataError: The data cannot be used, as far as the footers of the files show this.
        """
        return submitted(partial(self._call, **arguments))

    def get_booster(self) -> BoosterT:
        """Return the model of the last call of `fit`, or of the last call of `submit` whose result was read.

        Raises:
            InvalidArgumentError: `fit` has not been called, or has failed.
        """
        if self._booster is None:
            import_package(self._framework)
            self._booster = self.get_result().booster()
        return self._booster

    def get_eval_results(self) -> dict[str, dict[str, list[float]]]:
        """Return the metrics of the last call of `fit`, as a dict: eval set -> metric -> one value per round."""
        return self.get_result().eval_results

    def get_result(self) -> TrainResult:
        """Return the result of the last call of `fit`: metrics, best round, and statistics of each worker.

        Raises:
            InvalidArgumentError: `fit` has not been called, or has failed.
        """
        if self._result is None:
            raise InvalidArgumentError(
                "this estimator has no model yet: call fit(), or call result() of the handle that submit() returned"
            )
        return self._result

    def predict(self, dataset: Dataset) -> np.ndarray:
        """Predict every row of a dataset in this process, one row group at a time.

        Args:
            dataset: Rows to predict, with the columns that the model was trained on, and with the column of the margins
                if `fit` had `base_margin_col` or `base_margin_cols`.

        Returns:
            Predictions in the order of the rows: ``[rows]``, or ``[rows, classes]`` if the objective gives several
            values per row. If the objective is a function, the predictions are raw scores; if there are several scores
            per row (``num_class``), XGBoost returns the index of the highest score instead.
        """
        booster = self.get_booster()
        with ExitStack() as staged:
            connector = connector_of("dataset", dataset, staged)
            predictor = library_of(self._framework).predictor(
                booster, self._input_cols, base_margin_cols=self._base_margin_cols
            )
            return predictor.predict_dataset(connector)

    def _call(
        self,
        staged: ExitStack,
        dataset: Dataset,
        eval_set: Dataset | Mapping[str, Dataset] | None,
        init_model: InitialModel,
        xgb_model: InitialModel,
        **options: Any,
    ) -> Call[BoosterT]:
        """Return the `Call` object that trains a model."""
        initial = self._stored(init_model, xgb_model)
        named = eval_set if isinstance(eval_set, Mapping) else {} if eval_set is None else {"eval": eval_set}
        spec = JobSpec(
            framework=self._framework,
            dataset=connector_of("dataset", dataset, staged).to_spec(),
            eval_set={name: connector_of(f'eval_set "{name}"', rows, staged).to_spec() for name, rows in named.items()},
            n_estimators=self.n_estimators,
            params=self.params,
            scaling_config=self.scaling_config,
            run_config=self.run_config,
            init_model=initial,
            user_code=NOT_STORED if self.user_code else None,
            **options,
        )
        return Call(call_of(spec, self.user_code), partial(self._trained, spec.input_cols, spec.margin_cols))

    def _stored(self, init_model: InitialModel, xgb_model: InitialModel) -> str | None:
        """Load the model from which the training continues, store it as a file, and return the file's path."""
        if xgb_model is not None and (init_model is not None or self._framework != "xgboost"):
            raise InvalidArgumentError(
                "xgb_model is XGBoost's name of init_model: "
                + ("set only one of the two" if self._framework == "xgboost" else "set init_model instead")
            )
        model = init_model if xgb_model is None else xgb_model
        if model is None:
            return None
        from shoal.jobs import shipped_code

        if not isinstance(model, str | os.PathLike):
            import_package(self._framework)
            return shipped_code.store(library_of(self._framework).serialised(model))
        from shoal.models import loading

        named = os.fspath(model)
        check_model_version(named)
        return shipped_code.store(loading.load_init_model(absolute_model(named), self._framework))

    def _trained(self, input_cols: tuple[str, ...], base_margin_cols: tuple[str, ...], result: TrainResult) -> BoosterT:
        """Store a trained model in this estimator, and return the model."""
        self._result, self._booster = result, None
        self._input_cols, self._base_margin_cols = input_cols, base_margin_cols
        return self.get_booster()


def connector_of(argument: str, dataset: Dataset, staged: ExitStack) -> DataConnector:
    """Return a `DataConnector` for a dataset. A DataFrame is copied to files (staged) first, which `staged` removes."""
    if isinstance(dataset, DataConnector):
        return dataset

    if not is_frame(dataset):
        raise InvalidArgumentError(
            f"{argument} must be a DataConnector, a ShardedDataConnector or a DataFrame, not {type(dataset).__name__}: "
            "DataConnector.from_parquet(path) creates a connector"
        )
    connector = DataConnector.from_dataframe(dataset)
    staged.callback(connector.discard_staging)
    return connector
