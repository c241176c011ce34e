"""Define the interface of a boosting library: one object answers all that differs between the libraries, and its models
predict rows or continue a training."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from shoal.boosting_libraries import BOOSTING_LIBRARIES, Framework, loaded
from shoal.data.checks import check_categories, check_codes
from shoal.data.numpy_columns import Categories, as_categories, encoded
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError, InvalidArgumentError, MissingExtraError
from shoal.lazy_imports import np, pa, pc, pd
from shoal.training.boosting.messages import History, Prepared, Task
from shoal.training.boosting.params import (
    ONE_WORKER,
    Direction,
    Directions,
    Names,
    Objective,
    Unsupported,
    UserCode,
    agreed,
    custom_text,
    merge,
)
from shoal.training.boosting.rows import check_predictable, margins_of
from shoal.training.host.imports import add_estimators
from shoal.training.reporting import say

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

    from shoal.data.connector import DataConnector
    from shoal.training.boosting.request import TrainRequest, TrainResult
    from shoal.training.gang.gang import Gang
    from shoal.training.gang.placement import GangShape


Predict = Callable[["pa.Table", "np.ndarray | None"], "np.ndarray"]
"""Function that predicts a batch. Its arguments are the features (a table in the types of the dataset) and the margins
(float64 ``[rows]`` or ``[rows, outputs]``, or None); it returns predictions (``[rows]`` or ``[rows, classes]``)."""


@dataclass(frozen=True, slots=True)
class Output:
    """Form of the predictions of a model that is not trained yet, as its parameters determine it.

    Args:
        objective: Name of the objective, as an error names it.
        values: Number of values per row.
        classes: Number of classes; 2 if the objective has no number of classes.
        gives_classes: Whether the predictions are class numbers.
        is_unbounded: Whether the predictions are raw scores, counts or times, and so no probabilities.
    """

    objective: str
    values: int = 1
    classes: int = 2
    gives_classes: bool = False
    is_unbounded: bool = False


@dataclass(frozen=True)
class BoosterPredictor:
    """Predictor for the rows of tables and datasets, with one trained model (booster) of any boosting library.

    Args:
        predict: Function that predicts a batch.
        input_cols: Feature columns, in the order of the training.
        categories: Categories of the training set, by column; any other value counts as missing.
        base_margin_cols: Columns of margins, if the model was trained with them.
        code_cols: Categorical columns whose categories the model does not contain; their values are the integer codes
            of the training.
        classes: Classes of a classifier that another program trained, in the order of its probabilities; None if the
            model has none, or if they are 0, 1 and so on.
        gives_classes: Whether the predictions are numbers of classes and not probabilities, as with ``multi:softmax``.
    """

    predict: Predict
    input_cols: tuple[str, ...]
    categories: Categories
    base_margin_cols: tuple[str, ...] = ()
    code_cols: tuple[str, ...] = ()
    classes: tuple[Any, ...] | None = None
    gives_classes: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a table for :meth:`predict_table` must contain; each name occurs once."""
        return tuple(dict.fromkeys((*self.input_cols, *self.base_margin_cols)))

    def check(self, source: ParquetSource) -> None:
        """Check, using only Parquet footers, that a dataset has all columns of the model, with suitable types.

        Raises:
            DataError: A column is missing, or is neither numeric nor categorical, or a margin is null.
        """

        # Categories that are floats come from other programs. Their columns are numeric columns.
        types = {name: values.type for name, values in self.categories.items() if values.type != pa.float64()}
        check_predictable(source, self.input_cols, self.base_margin_cols, tuple(types), types)
        check_codes(source, self.code_cols)

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the model's predictions for the rows of a table: an array ``[rows]`` or ``[rows, classes]``.

        Raises:
            DataError: A margin is null, NaN or infinite; XGBoost would predict a class for it nevertheless.
        """
        margin = margins_of(table, self.base_margin_cols, "float64")
        for name, values in zip(self.base_margin_cols, () if margin is None else np.atleast_2d(margin.T), strict=True):
            if bad := int((~np.isfinite(values)).sum()):
                raise DataError(
                    f'the base_margin "{name}" is null, NaN or infinite in {bad} of {len(values)} rows: every row '
                    "needs a finite number, so correct these rows, or leave them out"
                )
        return self.predict(encoded(table, self.categories).select(self.input_cols), margin)

    def predict_dataset(self, connector: DataConnector) -> np.ndarray:
        """Return the predictions of a whole dataset, in row order.

        Raises:
            DataError: A column is missing, or is neither numeric nor categorical.
        """
        self.check(connector.source)
        return np.concatenate([self.predict_table(table) for table in connector.iter_batches(self.columns)])


def class_probabilities(predicted: np.ndarray) -> np.ndarray:
    """Return a classifier's probabilities in the form of a booster's: of class 1 only if there are two classes."""
    return predicted[:, 1] if predicted.ndim == 2 and predicted.shape[1] == 2 else predicted


_NAMED = 5
"""Number of new categories of a column that a message lists; the others are only counted."""


@dataclass(frozen=True)
class InitModel:
    """Model from which a training continues.

    Args:
        content: The model, as the library's workers load it.
        rounds: Number of boosting rounds in the model.
        features: Names of the feature columns, in the model's order; empty if the model has no names.
        num_features: Number of feature columns.
        categories: Categories of each categorical column; the code of a category is its index.
        code_cols: Categorical columns whose categories the model does not contain, and whose codes are thus not known.
        objective: Objective, as the library describes it; empty if LightGBM's objective was a function.
        outputs: Number of raw scores per row.
        booster: Kind of the booster, such as "gbtree".
        missing: Value of the features that the model stores as missing; None: it stores none.
    """

    content: bytes
    rounds: int
    features: tuple[str, ...]
    num_features: int
    categories: Categories
    code_cols: tuple[str, ...]
    objective: str
    outputs: int
    booster: str
    missing: float | None = None

    def check(self, request: TrainRequest, source: ParquetSource) -> None:
        """Check that the training has the features and the kinds of categories of this model.

        Raises:
            InvalidArgumentError: The features, the categorical columns or the value that counts as missing differ.
            DataError: The categories of a column are of another type in the training set.
        """
        named = list(request.input_cols)
        if len(named) != self.num_features or (self.features and named != list(self.features)):
            theirs = _listed(self.features) if self.features else f"{self.num_features} columns without names"
            raise InvalidArgumentError(
                f"init_model has other features than the training: the model has {theirs}, and input_cols are "
                f"{_listed(named)}. Set input_cols to the model's features, in the model's order"
            )
        if self.missing is not None and request.missing != self.missing:
            raise InvalidArgumentError(
                f"init_model was trained with missing={self.missing:g}, and this training has missing="
                f"{request.missing}: set missing={self.missing:g}"
            )
        if self.missing is None and request.missing is not None:
            say(
                f"init_model does not say which value counts as missing: if it was trained without "
                f"missing={request.missing:g}, its trees treat this value in another way than before"
            )
        if self.code_cols:
            raise InvalidArgumentError(
                f"init_model does not contain the categories of its categorical columns {_listed(self.code_cols)}, so "
                "their codes are not known: continue from a model that was trained with categorical_cols"
            )
        if set(request.categorical_cols) != set(self.categories):
            raise InvalidArgumentError(
                f"init_model has other categorical columns than the training: the model has {_listed(self.categories)},"
                f" and categorical_cols are {_listed(request.categorical_cols)}. Set categorical_cols to those of the "
                "model"
            )
        check_categories(source, {name: values.type for name, values in self.categories.items()})

    def check_learner(self, objective: str, outputs: int, booster: str) -> None:
        """Check that the training has the objective, the number of outputs and the kind of booster of this model.

        Raises:
            InvalidArgumentError: One of them differs.
        """
        for what, mine, asked in (
            ("objective", self.objective or "function", objective or "function"),
            ("number of outputs per row", self.outputs, outputs),
            ("booster", self.booster, booster),
        ):
            if mine != asked:
                raise InvalidArgumentError(
                    f"init_model was trained with another {what} than this training uses: {mine} and {asked}. Set the "
                    "parameters of the model, or train without init_model"
                )

    def categories_for(self, found: Categories) -> dict[str, pa.Array]:
        """Return this model's categories, because its trees contain their codes, and report new ones."""
        for name, values in found.items():
            known = self.categories[name]
            is_known = pc.is_in(as_categories(values, known.type), value_set=known)
            new = values.filter(pc.invert(is_known)).to_pylist()
            if new:
                say(
                    f'column "{name}" has {len(new)} categories that init_model does not know, which count as missing '
                    f"values: {_listed(map(str, new[:_NAMED]))}{', ...' * (len(new) > _NAMED)}"
                )
        return {name: self.categories[name] for name in found}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


_FEWEST_COLUMNS, _ROWS_PER_COLUMN = 100, 1_000


def is_wide(columns: int, rows: int) -> bool:
    """Return whether workers that divide the rows of a table would spend most of the time on work that each does for
    all columns, such as finding the splits, and on exchanging histograms.

    Measured with 2 workers: XGBoost, which divides the columns instead, takes for 50 k rows x 1,000 columns less than
    half the time, for 50 k x 200 three quarters, for 200 k x 100 as long, and for 500 k x 28 more.
    """
    return columns >= _FEWEST_COLUMNS and rows <= _ROWS_PER_COLUMN * columns


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
    foreign_file: ClassVar[str] = ""
    """What a file contains that no known program has written as a model, and what to do; for :meth:`why_unreadable`."""
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()
    """Parameters with which the library cannot train."""
    quantile_leaves: ClassVar[tuple[str, ...]] = ()
    """Objectives whose leaves several workers set only approximately."""
    ranking: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the canonical names of the objectives that rank the rows of a group."""
    multiclass: ClassVar[tuple[str, ...]] = ()
    """Canonical names of the objectives that need the number of classes."""
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
        """Return the version of the installed library.

        Raises:
            MissingExtraError: The library is not installed.
        """
        return str(import_package(self.name).__version__)

    def requirement(self) -> str:
        """Return the requirement that installs the library in its version here."""
        return f"{BOOSTING_LIBRARIES[self.name].distributions[0]}=={self.version()}"

    # Memory

    reads: ClassVar[int] = 1
    """Number of times that the workers read all rows before the first round."""
    reads_float32: ClassVar[bool] = False
    """Whether the workers get the features as float32, and not in the types of the files."""
    trains_from_disk: ClassVar[bool] = False
    """Whether the quantised rows may be on disk."""

    def reads_again(self, task: Task) -> bool:
        """Return whether the workers read the rows between rounds, too."""
        return False

    def memory_fields(self, task: Task, features: int, all_rows: int, share: float) -> dict[str, Any]:
        """Return the fields of `WorkerLoad` that differ between the libraries.

        Args:
            task: Task of the worker.
            features: Number of feature columns of the worker.
            all_rows: Training rows of all workers.
            share: Share of the sample of these rows that the worker holds.

        Raises:
            InvalidArgumentError: There is no formula for the memory of this library.
        """
        raise InvalidArgumentError(f"the memory of trainings with {self.title} is not known: give the number of nodes")

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

    def gpu_problem(self, params: Mapping[str, Any]) -> str | None:
        """Return the reason why the library cannot train on a GPU in this process, with advice for the user; None if
        GPUs work.
        """
        return self.why_cpu()

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

    def check_objective(self, request: TrainRequest, merged: Mapping[str, Any]) -> None:
        """Check that a training has what the objective in its merged parameters needs.

        Raises:
            InvalidArgumentError: The column of the groups or the number of classes is missing.
        """
        objective, given = self.objective_of(merged), f'objective="{merged.get("objective")}"'
        if objective.startswith(self.ranking) and request.group_col is None:
            raise InvalidArgumentError(f"{given} ranks rows within groups: set group_col to the column of the groups")
        if objective in self.multiclass and not merged.get("num_class"):
            raise InvalidArgumentError(f"{given} needs the number of classes: set num_class in params")

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

    def joins_workers(self, request: TrainRequest, user_code: UserCode, rows: int) -> bool:
        """Return whether one worker trains with the CPUs of all workers on one host; `rows`: training rows."""
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

    def init_model(self, content: bytes) -> InitModel:
        """Read a model from which a training continues.

        Raises:
            InvalidArgumentError: The library cannot load the model, or cannot continue a training.
            DataError: The model's categories are not known.
        """
        raise InvalidArgumentError(f"{self.title} cannot continue from a model: remove init_model")

    def booster_to_continue(
        self, content: bytes, errors: tuple[type[Exception], ...], own_message: Callable[[BaseException], str]
    ) -> Any:
        """Return the booster from which a training continues.

        Args:
            content: The booster in the library's own format.
            errors: What the library raises if it cannot load a booster.
            own_message: Function that returns the message of such an error without the place in the library's code.

        Raises:
            InvalidArgumentError: The library cannot load the booster.
        """
        if (why := self.why_unreadable(content)) is not None:
            raise InvalidArgumentError(f"{self.title} cannot load init_model: {why}")
        try:
            return self.booster_of(content)
        except errors as error:
            raise InvalidArgumentError(
                f"{self.title} cannot load init_model: {own_message(error)}. Use a model that {self.title} has written"
            ) from error

    def recognises(self, content: bytes) -> bool:
        """Return whether the first bytes of a file are those of the library's models, and of no other files."""
        return False

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

    # Models in MLflow

    def log_model(self, booster: Any, **options: Any) -> ModelInfo:
        """Log a booster to the active MLflow run, with options of ``mlflow.<flavour>.log_model``."""
        return cast("ModelInfo", self._flavour().log_model(booster, **options))

    def has_logged(self, info: ModelInfo) -> bool:
        """Return whether MLflow describes a model as one of the library."""
        return self.name in info.flavors

    def load_logged(self, folder: str, info: ModelInfo) -> Any:
        """Load a booster or estimator from a folder that MLflow has written.

        Raises:
            Exception: The files are damaged, or contain code that fails.
        """
        add_estimators(self.name)
        return self._flavour().load_model(folder)

    def _flavour(self) -> ModuleType:
        return importlib.import_module(f"mlflow.{self.name}")

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


def import_package(package: str) -> Any:
    """Import a package that an extra with the same name installs.

    Raises:
        MissingExtraError: The package is not installed.
        ImportError: It cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(package, extra=package) from error


def library_of(framework: str) -> Library:
    """Return a boosting library, without a check of what is installed."""
    return cast("Library", loaded(framework))


def libraries() -> list[Library]:
    """Return all registered libraries."""
    return [library_of(name) for name in BOOSTING_LIBRARIES]


def owner_of(model: Any) -> Library | None:
    """Return the library of a booster or estimator; None if it is another kind of model."""
    return next((each for each in libraries() if each.owns(model)), None)
