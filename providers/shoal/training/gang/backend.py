"""Define the interface with which a gang (group of workers) starts, calls and kills its workers.

The workers are Ray actors, or child processes of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from shoal.training.gang.placement import Seat
from shoal.training.gang.worker import Failure, Joined, Lost, Place, Success

Answered = Callable[[int, Success | Failure | Lost], None]
"""Type of a function that receives a worker's rank and the outcome of the worker's call. The function may be called
from any thread."""


class Workers(Protocol):
    """Processes of a gang's workers; each process contains a `shoal.training.gang.worker.Worker`."""

    seats: Sequence[Seat]
    """Placement of each worker, by rank."""
    host: str
    """Address of the driver that all nodes can reach."""
    listen_host: str
    """Address at which the driver accepts the workers' sockets."""

    def join(self, places: Sequence[Place], env: Mapping[str, str], timeout: float) -> Iterator[Joined]:
        """Start the workers, connect them to the driver, and yield each worker's `Joined` in the order of the ranks.

        Raises:
            WorkerLostError: A worker died, or did not answer in time.
        """

    def preload(self, modules: Sequence[str], complete: bool, ranks: Iterable[int]) -> None:
        """Tell the workers of these ranks to import modules before their next call."""

    def run(self, function: Callable[..., Any], args_by_rank: Mapping[int, Sequence[Any]], answered: Answered) -> None:
        """Start a call in the workers of these ranks, and return without waiting."""

    def replace(self, rank: int, place: Place, env: Mapping[str, str], timeout: float) -> Joined:
        """Start a worker in the place of one that has ended, on the same node.

        Raises:
            WorkerLostError: The node has ended, or the worker died or did not answer in time.
        """

    def kill(self) -> None:
        """Kill the workers, and free their CPUs and GPUs."""

    def clean_up(self) -> None:
        """Remove the temporary working folders of workers that have ended."""
