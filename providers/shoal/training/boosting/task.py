"""What passes between a training's driver and its workers, whichever library boosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shoal.training.boosting.rows import Columns, Part
from shoal.training.boosting.user_code import UserCode

History = dict[str, dict[str, list[float]]]
"""Eval set -> metric -> value per round."""


@dataclass(frozen=True, slots=True)
class Task:
    """All that one worker needs for a training.

    Args:
        train: Its rows to train on.
        eval_sets: Its rows of each eval set, by name.
        columns: What the columns are for.
        params: The library's parameters, without the seed.
        seed: The seed of the first segment; each further one adds one.
        early_stopping_rounds: Rounds without improvement to stop after; None: never.
        print_every: Print the metrics every so many rounds; 0: never.
        user_code: The user's callbacks, objective and metrics.
        external_memory: Keep the matrices on disk; None: where they do not fit in memory.
        connection: How the library's workers find each other.
    """

    train: Part
    eval_sets: dict[str, Part]
    columns: Columns
    params: dict[str, Any]
    seed: int = 0
    early_stopping_rounds: int | None = None
    print_every: int = 0
    user_code: UserCode = field(default_factory=UserCode)
    external_memory: bool | None = None
    connection: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What it took a worker to build its matrices.

    Args:
        passes: How often the training rows were decoded.
        read_seconds: Seconds spent reading and decoding.
        quantise_seconds: Seconds spent building matrices beside that, waiting for peers included.
        idle_rss_bytes: Resident size of the worker before it read anything.
        external_memory: Whether the matrices are on disk.
    """

    passes: int
    read_seconds: float
    quantise_seconds: float
    idle_rss_bytes: int
    external_memory: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model between two segments.

    Args:
        rounds: Rounds of boosting in it.
        model: The booster, serialised; empty before the first round.
        history: The metrics of its rounds.
    """

    rounds: int = 0
    model: bytes = b""
    history: History = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rounds to train between two checkpoints.

    Args:
        index: Number of the segment, from 0.
        stop: Round to stop before.
        last: Whether the training ends with it.
        resume: Where to go on from, for workers that have not trained the segment before; None: they have.
    """

    index: int
    stop: int
    last: bool
    resume: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Boosted:
    """What came of a segment.

    Args:
        stopped: Whether training ends here, early.
        checkpoint: The model so far; of rank 0 alone, since all have the same.
        best_iteration: Best round with early stopping.
        best_score: Its metric.
        train_seconds: Seconds spent boosting and evaluating.
        peak_rss_bytes: Highest resident size of the worker during this training.
    """

    stopped: bool
    checkpoint: Checkpoint | None
    best_iteration: int | None
    best_score: float | None
    train_seconds: float
    peak_rss_bytes: int
