"""Divide the rounds of a training into segments. Each segment ends with a checkpoint, from which the training can
continue."""

from __future__ import annotations

from dataclasses import dataclass, field

History = dict[str, dict[str, list[float]]]
"""Values of the metrics: name of an eval set -> name of a metric -> one value per round."""

_FEWEST_ROUNDS = 50
"""Minimum default number of rounds between two checkpoints. 50 rounds take seconds and a checkpoint takes milliseconds,
so the checkpoints do not slow the training down."""
_SEGMENTS = 4
"""Default number of segments (groups of rounds that end with a checkpoint) of a training of more than 200 rounds.
If the training samples rows or columns, each segment begins with a prediction of all rows, which costs about a tenth
of a round for each earlier round. More segments would therefore make the training slower."""


def segment_length(rounds: int, wish: int | None) -> int:
    """Return the number of rounds between two checkpoints."""
    return wish or max(_FEWEST_ROUNDS, -(-rounds // _SEGMENTS))


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
