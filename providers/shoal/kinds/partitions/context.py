"""The context of a partition: what the function that processes the partition can ask and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import InvalidArgumentError
from shoal.kinds.partitions.keys import Key


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
