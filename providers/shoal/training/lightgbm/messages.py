"""Define the messages between the driver and the workers during the preparation of a LightGBM training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.training.boosting.messages import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.training.lightgbm.bin_sample import Share


@dataclass(frozen=True, slots=True)
class Opening:
    """First message from the driver to a worker: the worker's task, and the position of its rows among all rows.

    Args:
        task: Data and parameters of the worker.
        share: Position of the worker's rows among all rows.
    """

    task: Task
    share: Share


@dataclass(frozen=True, slots=True)
class Offer:
    """First message from a worker to the driver: the worker's part of the sample for LightGBM's bins, and the worker's
    address.

    Args:
        sample: The worker's part of the sample.
        address: Address and port at which the worker will listen.
    """

    sample: pa.Table
    address: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """Last message from the driver to all workers: LightGBM's bins, and all workers' addresses.

    Args:
        bins: The :class:`shoal.training.lightgbm.binning.Bins`, from `cluster.share`.
        machines: Address and port of each worker, by rank.
    """

    bins: Any
    machines: tuple[str, ...]
