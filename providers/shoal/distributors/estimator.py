"""The base class of the boosting estimators: it takes a dataset of any kind and returns the library's own model."""

from __future__ import annotations

import atexit
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from shoal.data.connector import DataConnector
from shoal.distributors.dispatch import run
from shoal.errors import InvalidArgumentError, MissingExtraError
from shoal.training.boosting.request import Framework, TrainRequest, TrainResult
from shoal.training.boosting.user_code import UserCode
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig, gpu_wish

if TYPE_CHECKING:
    import numpy as np

    from shoal.data.spec import DatasetSpec

Dataset = Any
"""A `DataConnector` or `ShardedDataConnector`, or a pandas DataFrame."""

BoosterT = TypeVar("BoosterT")


class BoostingEstimator(ABC, Generic[BoosterT]):
    """Estimator that trains with a boosting library on all nodes of a pool.

    Args:
        n_estimators: Rounds of boosting.
        params: The library's parameters, already merged with the estimator's arguments.
        scaling_config: Number and size of the workers.
        user_code: Callbacks, objective and metrics of the user.
        run_config: Pool to run on, and limits of the run.

    Raises:
        InvalidArgumentError: Arguments contradict each other.
    """

    _framework: ClassVar[Framework]

    def __init__(
        self,
        n_estimators: int,
        params: dict[str, Any],
        scaling_config: ScalingConfig,
        user_code: UserCode,
        run_config: RunConfig | None,
    ) -> None:
        self.n_estimators = n_estimators
        self.params = params
        self.scaling_config = scaling_config
        self.user_code = user_code
        self.run_config = run_config or RunConfig()
        gpu_wish(self.scaling_config, self._device())
        self._result: TrainResult | None = None
        self._booster: BoosterT | None = None
        self._request: TrainRequest | None = None

    def fit(
        self,
        dataset: Dataset,
        input_cols: Sequence[str],
        label_col: str,
        eval_set: Dataset | Mapping[str, Dataset] | None = None,
        verbose_eval: bool | int | None = None,
        *,
        weight_col: str | None = None,
        group_col: str | None = None,
        base_margin_col: str | None = None,
        early_stopping_rounds: int | None = None,
        external_memory: bool | None = None,
        categorical_cols: Sequence[str] = (),
    ) -> BoosterT:
        """Train a model. Every row goes to exactly one worker.

        Args:
            dataset: Rows to train on: a connector of either kind, or a pandas DataFrame.
            input_cols: Feature columns, numeric or boolean except `categorical_cols`. Nulls are missing values.
            label_col: Label column, without nulls.
            eval_set: Rows to evaluate on after each round, reported as "eval"; a dict names several eval sets.
            verbose_eval: Print the metrics here: True every round, n every n rounds.
            weight_col: Column of row weights; with XGBoost and groups, the same for all rows of one.
            group_col: Column of groups, such as queries, for ranking. The rows of a group must be adjacent; they go to
                one worker.
            base_margin_col: Column of margins to boost from.
            early_stopping_rounds: Stop when the last metric of the last eval set has not improved for this many rounds;
                a `custom_metric` comes after the library's own metrics.
            external_memory: Keep the quantised rows on the nodes' disks (True) or in memory (False); by default on disk
                only where they do not fit in memory. LightGBM does not support True.
            categorical_cols: Feature columns whose values are categories: text, whole numbers or booleans. The model
                stores its categories; any other value in an eval set or a prediction counts as missing.

        Returns:
            The library's own booster, with `input_cols` as its feature names.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
            DataError: The data cannot be used. The message names file, column and row group where it can.
            CapacityError: The active nodes have too few CPUs or GPUs.
            TrainingError: The library refuses a parameter, or the training failed. The message names the rank that
                failed first.
        """
        own: list[DataConnector] = []
        self._result = self._booster = None
        try:
            self._request = self._make_request(
                dataset,
                eval_set,
                own,
                input_cols=input_cols,
                label_col=label_col,
                verbose_eval=verbose_eval,
                weight_col=weight_col,
                group_col=group_col,
                base_margin_col=base_margin_col,
                early_stopping_rounds=early_stopping_rounds,
                external_memory=external_memory,
                categorical_cols=categorical_cols,
            )
            self._result = run(self._request, self.user_code)
        finally:
            # These copies of DataFrames were staged for this training only.
            for connector in own:
                connector.discard_staging()
        return self.get_booster()

    def get_booster(self) -> BoosterT:
        """Return the model of the last `fit`.

        Raises:
            InvalidArgumentError: If there was none.
        """
        if self._booster is None:
            self._require()
            self._booster = self.get_result().booster()
        return self._booster

    def get_eval_results(self) -> dict[str, dict[str, list[float]]]:
        """Return eval set -> metric -> value per round, of the last `fit`."""
        return self.get_result().eval_results

    def get_result(self) -> TrainResult:
        """Return the result of the last `fit`: metrics, best round, rows, and time and memory of each worker."""
        if self._result is None:
            raise InvalidArgumentError("this estimator has no model yet: call fit() first")
        return self._result

    def predict(self, dataset: Dataset) -> np.ndarray:
        """Predict every row in this process, one row group at a time.

        Args:
            dataset: The rows, with the columns that the model was trained on, including its margin column if it had
                one.

        Returns:
            ``[rows]``, or ``[rows, classes]`` where the objective gives several values per row, in row order. If the
            objective is a function, these are raw scores; with several scores per row (``num_class``) XGBoost returns
            the index of the highest.
        """
        booster = self.get_booster()
        assert self._request is not None
        own: list[DataConnector] = []
        try:
            connector = _connector("dataset", dataset, own)
            return self._predict(booster, connector, self._request)
        finally:
            for staged in own:
                staged.discard_staging()

    @abstractmethod
    def _device(self) -> str | None:
        """Return the device that the parameters name; None if they name none."""

    @abstractmethod
    def _predict(self, booster: BoosterT, connector: DataConnector, request: TrainRequest) -> np.ndarray:
        """Predict the rows with a model."""

    def _make_request(
        self,
        dataset: Dataset,
        eval_set: Dataset | Mapping[str, Dataset] | None,
        own: list[DataConnector],
        **options: Any,
    ) -> TrainRequest:
        named = eval_set if isinstance(eval_set, Mapping) else {} if eval_set is None else {"eval": eval_set}
        return TrainRequest(
            framework=self._framework,
            dataset=_kept(_connector("dataset", dataset, own)),
            eval_set={name: _kept(_connector(f'eval_set "{name}"', rows, own)) for name, rows in named.items()},
            n_estimators=self.n_estimators,
            params=self.params,
            scaling_config=self.scaling_config,
            run_config=self.run_config,
            **options,
        )

    def _require(self) -> None:
        try:
            importlib.import_module(self._framework)
        except ImportError as exc:
            raise MissingExtraError(self._framework, self._framework) from exc


def checked_rounds(n_estimators: int) -> int:
    """Check the number of rounds, and return it.

    Raises:
        InvalidArgumentError: If it is no positive whole number.
    """
    if isinstance(n_estimators, bool) or not isinstance(n_estimators, int) or n_estimators < 1:
        raise InvalidArgumentError(f"n_estimators must be a positive number, not {n_estimators!r}")
    return n_estimators


def _connector(argument: str, dataset: Dataset, own: list[DataConnector]) -> DataConnector:
    """Return the dataset as a connector. A DataFrame is staged, and its connector added to `own`."""
    if isinstance(dataset, DataConnector):
        return dataset
    if isinstance(dataset, str) or not hasattr(dataset, "__arrow_c_stream__"):
        raise InvalidArgumentError(
            f"{argument} must be a DataConnector, a ShardedDataConnector or a DataFrame, not {type(dataset).__name__}: "
            "DataConnector.from_parquet(path) makes one"
        )
    own.append(DataConnector.from_dataframe(dataset))
    return own[-1]


def _kept(connector: DataConnector) -> DatasetSpec:
    """Return the dataset's spec, and keep a staged copy until this process ends: predictions may use it after `fit`."""
    if connector.staging:
        atexit.register(connector.discard_staging)
    return connector.to_spec().model_copy(update={"staging": None})
