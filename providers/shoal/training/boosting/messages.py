"""Define the messages that the driver and the workers exchange during a boosting training, among them rank 0's reports
of finished rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.data.numpy_columns import Categories
from shoal.training.boosting.params import Direction, UserCode
from shoal.training.reporting import GangContext, metric_name
from shoal.training.timeouts import PROGRESS_REPORT_PERIOD_S

if TYPE_CHECKING:
    from shoal.data.connector import DataConnector
    from shoal.data.planning import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """A dataset, together with the shard (part of its rows) that one worker reads.

    Args:
        connector: Dataset.
        shard: Rows of this worker; may be empty for an eval set.
    """

    connector: DataConnector
    shard: Shard


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the feature, label, bound, weight, margin (score from which boosting starts) and group columns.

    Args:
        features: Feature columns, in the model's order.
        label: Label column.
        weight: Column of row weights, or None.
        base_margin: Columns of the scores (margins) from which boosting starts, one per output of the model.
        group: Column of groups, or None.
        categories: Categorical feature column -> its categories.
        types: Feature column -> name of its Arrow type, such as "int64".
        bounds: Columns of the labels' lower and upper bounds; empty without bounds.
        other_labels: The label columns after the first, if the model has one output per label column.
    """

    features: tuple[str, ...]
    label: str
    weight: str | None = None
    base_margin: tuple[str, ...] = ()
    group: str | None = None
    categories: Categories = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    bounds: tuple[str, ...] = ()
    other_labels: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all label columns."""
        return (self.label, *self.other_labels)

    @property
    def names(self) -> list[str]:
        """Names of all columns to read, without duplicates: features, labels, weight, margin, bounds, group."""
        given = (*self.features, *self.labels, self.weight, *self.base_margin, *self.bounds, self.group)
        return [name for name in dict.fromkeys(given) if name is not None]


@dataclass(frozen=True, slots=True)
class Task:
    """Data, parameters and functions that the driver sends to one worker before a training.

    Args:
        train: This worker's part of the training set.
        eval_sets: This worker's part of each eval set, by name.
        columns: Roles of the columns.
        params: Parameters of the library, without the seed.
        seed: Seed of the first segment; the seed of each further segment is one higher.
        early_stopping_rounds: Number of rounds without improvement after which training stops; None: do not stop early.
        direction: Direction of the metric that stops the training; None: the worker gets to know it.
        print_every: Number of rounds between two printed lines of metrics; 0: do not print metrics.
        user_code: The user's callbacks, objective and metrics.
        external_memory: Whether to keep the matrices on disk; None: only if they do not fit in memory.
        missing: Value of the features that counts as missing; None: only nulls and NaN.
        feature_weights: Weights with which XGBoost samples the features, one per feature; empty: equal weights.
        by_columns: Whether each worker reads all rows, but only its part of the feature columns.
        connection: Settings with which the library's workers connect to each other.
    """

    train: Part
    eval_sets: dict[str, Part]
    columns: Columns
    params: dict[str, Any]
    seed: int = 0
    early_stopping_rounds: int | None = None
    direction: Direction | None = None
    print_every: int = 0
    user_code: UserCode = field(default_factory=UserCode)
    external_memory: bool | None = None
    missing: float | None = None
    feature_weights: tuple[float, ...] = ()
    by_columns: bool = False
    connection: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Time and memory that a worker used to convert its rows to the library's matrices before the first round.

    Args:
        passes: Number of times that the training rows were decoded.
        read_seconds: Seconds for reading and decoding.
        quantise_seconds: Further seconds for building the matrices, including the time spent waiting for other workers.
        idle_rss_bytes: Resident memory of the worker's process before it read any data, in bytes.
        predicted_bytes: Predicted peak of the resident memory of the worker's process.
        limit_bytes: Largest resident memory that the worker's process could have.
        external_memory: Whether the matrices are on disk.
    """

    passes: int
    read_seconds: float
    quantise_seconds: float
    idle_rss_bytes: int
    predicted_bytes: int = 0
    limit_bytes: int = 0
    external_memory: bool = False


@dataclass(frozen=True, slots=True)
class Boosted:
    """Result of one worker after it trained a segment (the rounds between two checkpoints).

    Args:
        stopped: Whether the training stopped early in this segment.
        checkpoint: Model and metrics so far. Only rank 0 returns them, because all ranks have the same model; None on
            all other ranks.
        best_iteration: Number of the best round, from 0, if the training uses early stopping; else None.
        best_score: Value of the metric in the best round; None without early stopping.
        train_seconds: Seconds for boosting and evaluating.
        peak_rss_bytes: Highest resident memory of the worker's process during this training, in bytes.
    """

    stopped: bool
    checkpoint: Checkpoint | None
    best_iteration: int | None
    best_score: float | None
    train_seconds: float
    peak_rss_bytes: int


History = dict[str, dict[str, list[float]]]
"""Values of the metrics: name of an eval set -> name of a metric -> one value per round."""


def part_of(history: History, first: int = 0, stop: int | None = None) -> History:
    """Return a copy of the metrics of the rounds from `first` to before `stop`; None: to the last round."""
    return {
        name: {metric: values[first:stop] for metric, values in metrics.items()} for name, metrics in history.items()
    }


_FEWEST_ROUNDS = 50
"""Minimum default number of rounds between two checkpoints. 50 rounds take seconds and a checkpoint takes milliseconds,
so the checkpoints do not slow the training down."""
_SEGMENTS = 4
"""Default number of segments (groups of rounds that end with a checkpoint) of a training of more than 200 rounds.
If the training samples rows or columns, each segment begins with a prediction of all rows, which costs about a tenth
of a round for each earlier round. More segments would therefore make the training slower."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Model and metrics at the end of a segment (a group of rounds), from which the training can continue.

    Args:
        rounds: Number of boosting rounds that the training has added to the model.
        model: Serialised booster; empty before the first round of a training that starts anew.
        history: Metrics of the added rounds.
        init_rounds: Number of rounds in the model from which the training continued; 0 if it started anew.
    """

    rounds: int = 0
    model: bytes = b""
    history: History = field(default_factory=dict)
    init_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Message in which the driver tells the workers to train the rounds up to the next checkpoint.

    Args:
        index: Number of the segment, from 0.
        stop: First round after the segment.
        last: Whether this is the last segment of the training.
        resume: Checkpoint from which the workers continue, if they did not train the previous segment. None: the
            workers continue with the model in their memory.
    """

    index: int
    stop: int
    last: bool
    resume: Checkpoint | None


def next_segment(done: int, rounds: int, checkpoint_every: int | None, resume: Checkpoint | None) -> Segment:
    """Return the segment after the first `done` of `rounds` rounds; `resume` is that of :class:`Segment`."""
    length = checkpoint_every or max(_FEWEST_ROUNDS, -(-rounds // _SEGMENTS))
    index = done // length
    stop = min(rounds, (index + 1) * length)
    return Segment(index, stop, stop == rounds, resume)


_ROUNDS_A_NOTE = 500
"""Largest number of rounds that one message to the driver has: a message of more than 1 MiB ends the worker."""


class RoundReporter:
    """Reporter that sends the number of finished rounds and their metrics from rank 0 to the driver.

    On other ranks, the reporter sends nothing.

    Args:
        context: Gang context of this worker.
        rounds: Number of rounds that the driver knows.
    """

    def __init__(self, context: GangContext, rounds: int) -> None:
        self._context = context
        self._rounds = rounds
        self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S

    def done(self, rounds: int, history: History) -> None:
        """Report the rounds since the last report, unless that is less than 2 s old."""
        if self._context.rank == 0 and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_REPORT_PERIOD_S
            while self._rounds < rounds:
                stop = min(rounds, self._rounds + _ROUNDS_A_NOTE)
                part = part_of(history, self._rounds, stop)
                self._context.note({"first": self._rounds, "rounds": stop, "metrics": part})
                self._rounds = stop

    @contextmanager
    def reporting_on_error(self, history: History) -> Iterator[None]:
        """Report the rounds that are not reported yet if the `with` block, which adds to `history`, fails."""
        try:
            yield
        except Exception:
            self._next = 0.0
            rounds = max((len(values) for metrics in history.values() for values in metrics.values()), default=0)
            if rounds > self._rounds:
                self.done(rounds, history)
            raise


def by_round(history: History) -> list[dict[str, float]]:
    """Return the metrics of each round, under names such as ``eval-rmse`` (eval set "eval", metric "rmse")."""
    rounds: list[dict[str, float]] = []
    for name, metrics in history.items():
        for metric, values in metrics.items():
            rounds += [{} for _ in range(len(values) - len(rounds))]
            for each, value in zip(rounds, values, strict=False):
                each[metric_name(name, metric)] = float(value)
    return rounds
