"""Restart a training with new workers after it lost a worker or a node, up to `RunConfig.max_restarts` times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import CapacityError, WorkerLostError
from shoal.own_pauses import waited_since
from shoal.training.reporting import say
from shoal.training.run_config import RunConfig
from shoal.training.timeouts import REPLACE_NODE_S, RESOURCES_WAIT_S, RESTART_PERIOD_S

_T = TypeVar("_T")


class NodeLeavesError(Exception):
    """Raised at a checkpoint if a node of the training will shut down soon: the training then moves to other nodes."""


class Restarts:
    """Runner that restarts a training with new workers after a worker was lost, within `max_restarts` and `timeout`.

    Args:
        began: Time when the training began, from `time.monotonic`.

    Attributes:
        count: Number of restarts so far.
    """

    def __init__(self, run_config: RunConfig, began: float) -> None:
        self.count = 0
        self._most = run_config.max_restarts
        self._deadline = None if run_config.timeout is None else began + run_config.timeout

    @property
    def timeout(self) -> float | None:
        """Seconds from now until the time limit of the training; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds to wait for CPUs and GPUs that other work uses."""
        return RESOURCES_WAIT_S if self.timeout is None else min(RESOURCES_WAIT_S, self.timeout)

    def run(self, attempt: Callable[[], _T], *, checkpoint: Callable[[], str], shrink: Callable[[], str | None]) -> _T:
        """Call `attempt`, and call it again each time a worker was lost, until no restarts are left.

        `attempt` is also called again if it raises `NodeLeavesError`, which does not count as a restart.

        Raises:
            WorkerLostError: A worker was lost, and no restarts are left.
            CapacityError: The nodes are too small for the workers, or not enough resources became free in time.
        """
        lost_at: float | None = None
        while True:
            try:
                return attempt()
            except WorkerLostError as error:
                if self.count >= self._most:
                    raise
                self.count += 1
                lost_at = time.monotonic()
                say(f"{error}: continuing from {checkpoint()} (restart {self.count} of {self._most})")
            except NodeLeavesError as error:
                lost_at = time.monotonic()
                say(f"{error}: continuing from {checkpoint()} on other nodes")
            except CapacityError:
                # After a worker was lost, the pool may still be replacing the lost node, which takes time. The training
                # therefore waits and tries again instead of failing at once.
                waited = None if lost_at is None else waited_since(lost_at)
                if waited is None or waited > RESOURCES_WAIT_S or self.timeout == 0.0:
                    raise
                if waited > REPLACE_NODE_S and (fewer := shrink()):
                    say(f"the lost node was not replaced within {REPLACE_NODE_S:.0f} s: continuing with {fewer}")
                time.sleep(RESTART_PERIOD_S)
