"""Define the interface of a boosting library: one object answers all that differs between the libraries."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.boosting_libraries import BOOSTING_LIBRARIES, Framework, loaded
from shoal.training.boosting.messages import History, Prepared, Task
from shoal.training.boosting.model import BoosterPredictor, InitModel, Output
from shoal.training.boosting.params import (
    ONE_WORKER,
    Direction,
    Directions,
    Names,
    Unsupported,
    agreed,
    custom_text,
    merge,
)
from shoal.training.boosting.user_code import Objective, UserCode

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from shoal.training.boosting.request import TrainRequest, TrainResult
    from shoal.training.gang.gang import Gang
    from shoal.training.gang.placement import GangShape

OnAll = Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]
"""Type of a function that calls a function of the workers' module on all ranks at once. The arguments are the name of
the function to call and the arguments of each rank."""


class Library(ABC):
    """What shoal needs to know of a boosting library. The object has no state, and imports the library when needed."""

    name: ClassVar[Framework]
    """Name of the library's package and of its extra."""
    worker: ClassVar[str]
    """Module that runs in the workers: the functions `boost(Segment)`, `finish()` and those that :meth:`prepare` calls,
    and the class `Trials` (`boosting.trials.Trainer`)."""
    names: ClassVar[Names]
    """Aliases of parameters and objectives."""
    metric_param: ClassVar[str]
    """Parameter that names the metrics."""
    file_name: ClassVar[str]
    """Name of the file of a trained model. XGBoost chooses the file's format by the ending of the name."""
    foreign_file: ClassVar[str]
    """What a file contains that no known program has written as a model, and what to do."""
    unsupported: ClassVar[tuple[Unsupported, ...]]
    """Parameters with which the library cannot train."""
    quantile_leaves: ClassVar[tuple[str, ...]] = ()
    """Objectives whose leaves several workers set only approximately."""
    functions_tell_direction: ClassVar[bool] = False
    """Whether the metric functions of users tell whether a higher value is better."""
    combines_metrics: ClassVar[bool] = True
    """Whether several workers combine at least some metrics exactly. Otherwise each evaluates whole eval sets."""
    gpus_by_default: ClassVar[bool] = True
    """Whether a training without a wish uses GPUs if all nodes have some, unless :meth:`why_cpu` says why not."""

    @property
    def title(self) -> str:
        """Name of the library in texts."""
        return BOOSTING_LIBRARIES[self.name].title

    def version(self) -> str:
        """Return the version of the installed library."""
        return str(importlib.import_module(self.name).__version__)

    def flavour(self) -> ModuleType:
        """Return MLflow's module for models of the library."""
        return importlib.import_module(f"mlflow.{self.name}")

    # Requests and parameters

    @abstractmethod
    def check_request(self, request: TrainRequest) -> None:
        """Raise ValueError if the library has no such field, or accepts no such name of a feature."""

    def check_feature_names(self, names: Sequence[str], refused: str) -> None:
        """Raise ValueError if the name of a feature has one of the characters that the library refuses."""
        for name in names:
            if any(character in refused for character in name):
                raise ValueError(
                    f'input_cols contains "{name}", but {self.name} accepts no feature name with one of the characters '
                    f"{' '.join(refused)}: rename the column"
                )

    def merge_params(
        self, params: Mapping[str, Any] | None, objective: str | Objective | None, n_estimators: int
    ) -> dict[str, Any]:
        """Merge the user's params with the estimator's objective and number of rounds; see `boosting.params.merge`."""
        return merge(params, objective, n_estimators, self.names)

    def merged(self, request: TrainRequest, objective: Objective | None = None) -> dict[str, Any]:
        """Return the user's parameters as the library's `train` takes them, without the number of rounds."""
        return self.merge_params(request.params, objective, request.n_estimators)

    @abstractmethod
    def device_of(self, params: Mapping[str, Any]) -> str | None:
        """Return the device, such as "cpu" or "cuda", in merged parameters; None if the user set none."""

    def device(self, request: TrainRequest) -> str | None:
        """Return the device that the user set in `params`, or None if the user set none."""
        return self.device_of(self.merged(request))

    @abstractmethod
    def why_cpu(self) -> str | None:
        """Return the reason why the library trains on CPUs by default although all nodes have GPUs; None if the library
        trains on GPUs by default."""

    @abstractmethod
    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        """Return the reason why the library cannot train on a GPU in this process, with advice for the user; None if
        GPUs work.
        """

    @abstractmethod
    def params(
        self, request: TrainRequest, size: GangShape, user_code: UserCode, init_model: InitModel | None = None
    ) -> tuple[dict[str, Any], int]:
        """Check the parameters with the library; return the parameters of every worker and the seed of the training.

        Raises:
            InvalidArgumentError: Arguments contradict each other, or a parameter is unknown.
            InvalidParamsError: The library refuses a value; the message contains the library's message.
        """

    @abstractmethod
    def objective_of(self, params: Mapping[str, Any]) -> str:
        """Return the canonical name of the objective in merged parameters."""

    # Metrics

    @abstractmethod
    def metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> Directions:
        """Return the library's own metrics of an eval set, in the order of their evaluation, with their directions.

        Args:
            request: The training.
            params: Parameters that :meth:`params` has returned for it.
            user_code: The user's functions.
        """

    def stopping_direction(
        self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode
    ) -> Direction | None:
        """Return the direction of the metric that stops a training early, which is the last one.

        Returns:
            The direction; None if the training does not stop early, or if only the workers get to know the direction.

        Raises:
            InvalidArgumentError: The direction is not known, or `request.direction` contradicts the metric.
        """
        if request.early_stopping_rounds is None:
            return None
        if user_code.metrics:
            self.refuse_untold(user_code, request.direction)
            return request.direction
        metrics = self.metrics(request, params, user_code)
        if not metrics:
            return agreed("the metric of the objective", None, request.direction)
        last = next(reversed(metrics))
        return agreed(f'the metric "{last}"', metrics[last], request.direction)

    def refuse_untold(self, user_code: UserCode, given: Direction | None) -> None:
        """Refuse metrics of the user if neither they nor the user tell the direction of the deciding one.

        Raises:
            InvalidArgumentError: The direction is not known.
        """
        if user_code.metrics and not self.functions_tell_direction:
            agreed(custom_text(user_code), None, given)

    # A training in several workers

    def inexact_leaves(self, params: Mapping[str, Any], num_workers: int) -> str | None:
        """Return a line for the log if workers that divide the rows set the values of leaves only approximately; None
        if the values are exact."""
        objective = self.objective_of(params)
        if num_workers == 1 or objective not in self.quantile_leaves:
            return None
        return (
            f'objective "{objective}" with {num_workers} workers: the value of a leaf is the mean of the workers\' own '
            "quantiles, not the quantile of all rows, so the model differs from that of one worker. For the exact "
            f"values, {ONE_WORKER}"
        )

    def splits_columns(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode, rows: int) -> bool:
        """Return whether several workers divide the columns of `rows` rows, of the training set and the eval sets
        together, instead of the rows."""
        return False

    def whole_metrics(self, request: TrainRequest, params: Mapping[str, Any], user_code: UserCode) -> str:
        """Return the metrics that are exact only if every worker evaluates the whole eval sets, as a text for error
        messages; "" if the library combines the workers' values of all metrics exactly.
        """
        return "" if self.combines_metrics else f"the metrics of {self.title}"

    def connect(self, gang: Gang) -> list[dict[str, Any]]:
        """Return, for each rank, the settings with which the rank's worker connects to the other workers."""
        return [{}] * gang.shape.num_workers

    def prepare(self, on_all: OnAll, tasks: Sequence[Task]) -> list[Prepared]:
        """Make all workers, at the same time, read their rows and convert them to the boosting library's matrices."""
        return on_all("prepare", [(task,) for task in tasks])

    # Trained models

    @abstractmethod
    def load(self, trained: TrainResult) -> Any:
        """Load the model of a training from its bytes."""

    @abstractmethod
    def serialised(self, model: Any) -> bytes:
        """Return a booster, or the booster of a scikit-learn estimator, as bytes.

        Raises:
            InvalidArgumentError: It is no model of this library.
        """

    @abstractmethod
    def init_model(self, content: bytes) -> InitModel:
        """Read a model from which a training continues.

        Raises:
            InvalidArgumentError: The library cannot load the model.
            DataError: The model's categories are not known.
        """

    @abstractmethod
    def recognises(self, content: bytes) -> bool:
        """Return whether the first bytes of a file are those of the library's models."""

    def why_damaged(self, content: bytes) -> str | None:
        """Return why the library cannot load a file of its own, and what to do; None if it may be able to."""
        return None

    def why_unreadable(self, content: bytes) -> str | None:
        """Return what a file contains, and what to do, if it is no model of the library; None if it may be one.

        The libraries' own errors do not name what they have read, and some files end the process: an empty one in
        XGBoost 3.2, and one that was cut off or changed in LightGBM 4.6.
        """
        if self.recognises(content):
            return self.why_damaged(content)
        if other := next((each.name for each in libraries() if each.recognises(content)), None):
            return f"the file contains a model of {other}: train with the library of the model, or name another model"
        if not content:
            return "the file is empty: write the model again"
        if content.startswith(b"\x80"):
            return "the file contains a pickled object: load it, and pass the model itself, or write it with save_model"
        return self.foreign_file

    def why_unloadable(self, logged: Path) -> str | None:
        """Return why MLflow cannot load a model's file, if loading it would end the process."""
        return None

    @abstractmethod
    def output_of(self, params: Mapping[str, Any], *, custom_objective: bool) -> Output:
        """Return the form of the predictions of a model that will be trained with these parameters."""

    @abstractmethod
    def predictor(
        self, model: Any, input_cols: Sequence[str], *, base_margin_cols: Sequence[str] = ()
    ) -> BoosterPredictor:
        """Return an object that predicts the rows of tables with a booster or with an estimator of the library.

        A classifier predicts probabilities: of class 1 ``[rows]``, or of each class ``[rows, classes]``.

        Raises:
            DataError: The model's categories are not known.
        """

    @abstractmethod
    def features_of(self, model: Any) -> list[str]:
        """Return the names of a model's feature columns, in the model's order; empty if the model has no names."""

    @abstractmethod
    def num_features(self, model: Any) -> int:
        """Return the number of a model's feature columns."""

    @abstractmethod
    def as_sklearn(self, booster: Any, params: Mapping[str, Any], n_estimators: int, eval_results: History) -> Any:
        """Wrap a booster in a fitted scikit-learn estimator."""

    # Models of partitions: trained by the plain library in one process

    def owns(self, model: Any) -> bool:
        """Return whether a model is a booster or an estimator of the library."""
        return type(model).__module__.partition(".")[0] == self.name

    def is_booster(self, model: Any) -> bool:
        """Return whether a model is stored in the library's own format."""
        return self.owns(model) and type(model).__name__ == "Booster"

    @abstractmethod
    def content_of(self, booster: Any) -> bytes:
        """Return a booster in the library's own format."""

    @abstractmethod
    def booster_of(self, content: bytes) -> Any:
        """Return the booster of which :meth:`content_of` has returned the bytes."""

    @abstractmethod
    def train_rows(self, rows: Mapping[str, Any], params: Mapping[str, Any], rounds: int, user_code: UserCode) -> Any:
        """Train a booster as the plain library does, with all its parameters and the user's callbacks and objective.

        Args:
            rows: The features `data`, the `label` and the `weight` (None: all rows have the same weight), in pandas.
            params: All parameters of the library, with the seed.
            rounds: Number of boosting rounds.
            user_code: Callbacks and objective.
        """

    @abstractmethod
    def predict_rows(self, booster: Any, rows: pd.DataFrame) -> np.ndarray:
        """Predict rows, whose columns are the features of the booster, with one thread."""

    def columns_of(self, booster: Any) -> list[str]:
        """Return the names of the columns that :meth:`predict_rows` needs; empty if the booster has none."""
        return self.features_of(booster)


def library_of(framework: str) -> Library:
    """Return a boosting library, without a check of what is installed."""
    library: Library = loaded(framework)
    return library


def libraries() -> list[Library]:
    """Return all registered libraries."""
    return [library_of(name) for name in BOOSTING_LIBRARIES]


def owner_of(model: Any) -> Library | None:
    """Return the library of a booster or estimator; None if it is another kind of model."""
    return next((each for each in libraries() if each.owns(model)), None)
