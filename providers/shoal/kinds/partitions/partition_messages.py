"""The functions that are called for partitions, with their context, and what a worker and its partition process send to
each other."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.boosting_libraries import Framework
from shoal.data.parquet.source import ParquetSource
from shoal.errors import InvalidArgumentError
from shoal.kinds.partitions.bucket_rows import BatchInfo
from shoal.kinds.partitions.keys import Key
from shoal.lazy_imports import cloudpickle, pa, pd
from shoal.training.boosting.library import library_of, owner_of
from shoal.training.boosting.params import UserCode
from shoal.training.host.imports import import_lean

Status = Literal["succeeded", "failed"]

Kind = Framework | Literal["pickle", "rows"]
"""Form of a value: pickled, a model in the own format of its library, or a DataFrame in Arrow's format."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Return value of a function that has trained a model, in the own format of the model's library."""

    kind: Kind
    content: bytes


class PartitionFunction(ABC):
    """Base class of shoal's own functions for partitions. They get the rows as a table and the key; a function of the
    user gets the rows as a DataFrame."""

    @abstractmethod
    def prepare(self, keys: pa.DataType, by: Sequence[str]) -> None:
        """Import and read what the function needs, so that the processes that are forked from this worker share it, and
        check the keys of the rows.

        Args:
            keys: Type of the keys of the rows.
            by: Columns of the keys.

        Raises:
            DataError: The function cannot process rows with such keys.
        """

    @abstractmethod
    def __call__(self, table: pa.Table, key: Key) -> ModelBytes:
        """Process the rows of a partition."""


@dataclass(frozen=True, slots=True)
class PartitionProgram:
    """A pickled function.

    Args:
        content: The pickled function.
        digest: Digest by which the same function is recognised in another process, whose pickled bytes may differ.
    """

    content: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class Work:
    """What is the same for all partitions of a run.

    Args:
        source: Source of the dataset, which knows the types of pandas.
        columns: Columns that the function gets.
        by: Columns of the keys.
        rows_folder: Folder of the rows that were divided into buckets.
        seed: Seed of the run.
        threads: Number of threads of each function.
        function: Function that is called with the rows and the key of a partition; pickled until a worker has loaded
            it.
    """

    source: ParquetSource
    columns: tuple[str, ...]
    by: tuple[str, ...]
    rows_folder: str
    seed: int
    threads: int
    function: Any


@dataclass(frozen=True, slots=True)
class Bucket:
    """Order to process the partitions of a bucket.

    Args:
        batches: Places of the rows, in the order of the dataset.
        skip: Texts of the keys whose partitions have ended.
        attempts: Number of the attempt of a partition, by the text of its key; 1 if it is missing.
        budget_bytes: Memory that the process may use.
    """

    batches: Sequence[BatchInfo]
    skip: frozenset[str]
    attempts: dict[str, int]
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """The rows of a bucket were read; `partitions` is the number of its partitions, including those to skip."""

    partitions: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The function is about to be called for a partition."""

    key: Key
    text: str
    rows: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The function has returned or failed. The worker adds the log, and writes the outcome into a result file.

    Args:
        key: Key of the partition.
        status: Whether the function has returned.
        attempts: Number of attempts.
        rows: Number of rows.
        seconds: Seconds of the last call of the function.
        metrics: Metrics that the function has reported.
        error: Reason of a failure; empty if there is none.
        log: End of what the function has printed.
        value: Return value; None if the function has failed.
    """

    key: Key
    status: Status
    attempts: int
    rows: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    log: str = ""
    value: ModelBytes | None = None


@dataclass(frozen=True, slots=True)
class BucketEnded:
    """All partitions of the bucket have ended, or its rows could not be read because of an error."""

    error: str = ""


Message = Read | Begun | Outcome | BucketEnded


@dataclass(frozen=True)
class PartitionContext:
    """Facts about the partition that a function processes. `get_context` returns it inside the function.

    Attributes:
        key: Key of the partition.
        seed: Seed of the partition, computed from the seed of the run and the key. The random numbers of Python, NumPy
            and PyTorch begin with this seed.
        attempt: 1, or 2 if the process of the first attempt was lost.
        threads: Number of threads that the function may use.
    """

    key: Key
    seed: int
    attempt: int = 1
    threads: int = 1
    _metrics: dict[str, float] = field(default_factory=dict)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the partition, such as the error of its model. A later value replaces an earlier one.

        Raises:
            InvalidArgumentError: A value is not a number.
        """
        for name, value in metrics.items():
            try:
                self._metrics[str(name)] = float(value)
            except (TypeError, ValueError):
                raise InvalidArgumentError(f"the metric {name}={value!r} is not a number: report numbers") from None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics that were reported so far."""
        return dict(self._metrics)


_context: PartitionContext | None = None


def get_context() -> PartitionContext:
    """Return the context of the partition that this process processes.

    Raises:
        InvalidArgumentError: No partition is processed.
    """
    if _context is None:
        raise InvalidArgumentError(
            "get_context() can be called only inside a function that shoal.many.run or shoal.many.train calls"
        )
    return _context


def set_context(context: PartitionContext | None) -> None:
    """Set the context of the partition that this process processes."""
    global _context
    _context = context


def stored(model: Any) -> ModelBytes:
    """Return a model as bytes: a booster in its library's format, any other model pickled."""
    library = owner_of(model)
    if library is not None and library.is_booster(model):
        return ModelBytes(library.name, library.content_of(model))
    return ModelBytes("pickle", cloudpickle.dumps(model))


def loaded(kind: Kind, content: bytes) -> Any:
    """Return the object of which :func:`stored` has returned the bytes, or the DataFrame of :func:`rows_bytes`."""
    if kind == "rows":
        return rows_in(content).to_pandas()
    return cloudpickle.loads(content) if kind == "pickle" else library_of(kind).booster_of(content)


def rows_bytes(table: pa.Table) -> ModelBytes:
    """Return rows as bytes, in Arrow's format."""
    with io.BytesIO() as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        return ModelBytes("rows", file.getvalue())


def rows_in(content: bytes) -> pa.Table:
    """Return the rows of which :func:`rows_bytes` has returned the bytes."""
    return pa.ipc.open_stream(content).read_all()


@dataclass(frozen=True)
class SavedModel:
    """Function that stores the model that another function returns.

    Args:
        train: Function of the rows and the key of a partition that returns a model.
    """

    train: Callable[..., Any]

    def __call__(self, rows: pd.DataFrame, key: Key) -> ModelBytes:
        """Call the function, and return its model as bytes.

        Raises:
            InvalidArgumentError: The function has returned no model.
        """
        if (model := self.train(rows, key)) is None:
            raise InvalidArgumentError("the function returned None: return the model")
        return stored(model)


@dataclass(frozen=True)
class EstimatorTraining(PartitionFunction):
    """Function that trains a booster on the rows of a partition, as the plain library does in one process.

    Args:
        framework: Name of the library.
        params: All parameters of the library, with the seed.
        rounds: Number of boosting rounds.
        input_cols: Feature columns.
        label_col: Column of the labels.
        weight_col: Column of the weights; None: all rows have the same weight.
        user_code: Callbacks and objective.
    """

    framework: Framework
    params: Mapping[str, Any]
    rounds: int
    input_cols: tuple[str, ...]
    label_col: str
    weight_col: str | None = None
    user_code: UserCode = field(default_factory=UserCode)

    def prepare(self, keys: pa.DataType, by: Sequence[str]) -> None:
        """Import the library. Keys of any kind can be trained."""
        import_lean([self.framework], complete=bool(self.user_code))

    def __call__(self, table: pa.Table, key: Key) -> ModelBytes:
        """Train a booster on the rows."""
        rows = table.to_pandas()
        weight = None if self.weight_col is None else rows[self.weight_col]
        given = {"data": rows[list(self.input_cols)], "label": rows[self.label_col], "weight": weight}
        return stored(library_of(self.framework).train_rows(given, self.params, self.rounds, self.user_code))
