"""What passes between LightGBM's driver and workers while they prepare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.training.boosting.task import Task

if TYPE_CHECKING:
    import numpy as np
    from ray import ObjectRef

    from shoal.training.lightgbm.sampling import Share


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker is told first.

    Args:
        task: What to do.
        share: Which of all rows it has.
    """

    task: Task
    share: Share


@dataclass(frozen=True, slots=True)
class Offer:
    """What it answers.

    Args:
        sample: Its part of the sample, float32 ``[rows, columns]``.
        address: Where it will listen.
    """

    sample: np.ndarray
    address: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all go by.

    Args:
        sample: Ray's reference to the whole sample, float32 ``[rows, columns]``.
        machines: Where all of them will listen, by rank.
    """

    sample: ObjectRef
    machines: tuple[str, ...]
