"""What a worker and its partition process, which calls the user's function, send to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shoal.boosting_libraries import Framework
from shoal.data.parquet.source import ParquetSource
from shoal.jobs.partitions.bucket_rows import BatchInfo
from shoal.jobs.partitions.keys import Key

if TYPE_CHECKING:
    import pyarrow as pa

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
class Work:
    """What is the same for all partitions of a run.

    Args:
        function: Function that is called with the rows and the key of a partition.
        source: Source of the dataset, which knows the types of pandas.
        columns: Columns that the function gets.
        by: Columns of the keys.
        rows_folder: Folder of the rows that were divided into buckets.
        seed: Seed of the run.
        threads: Number of threads of each function.
    """

    function: Callable[..., Any]
    source: ParquetSource
    columns: tuple[str, ...]
    by: tuple[str, ...]
    rows_folder: str
    seed: int
    threads: int


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
class Ended:
    """The function has returned or failed."""

    status: Status
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    value: ModelBytes | None = None


@dataclass(frozen=True, slots=True)
class BucketEnded:
    """All partitions of the bucket have ended."""


@dataclass(frozen=True, slots=True)
class BucketFailed:
    """The rows of the bucket could not be read."""

    error: str


Message = Read | Begun | Ended | BucketEnded | BucketFailed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a partition, which is written into a result file.

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
    metrics: dict[str, float]
    error: str
    log: str
    value: ModelBytes | None
