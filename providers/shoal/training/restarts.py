"""Going on after a loss: a training that lost a worker or a node begins another gang, as often as it may."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import CapacityError, WorkerLostError
from shoal.training.context import say
from shoal.training.gang.gang import WAIT_SECONDS
from shoal.training.run_config import RunConfig

_REPLACE_SECONDS = 60.0
"""How long a lost node may take to be replaced before fewer workers go on, where that is allowed: a local one takes up
to 40 s, with the time until it is seen to be lost."""
_PATIENCE_SECONDS = 2.0
"""How often is looked for it."""

_T = TypeVar("_T")


class Resilience:
    """The limits of one training: how often it may go on after a loss, and for how long it may take.

    Args:
        run_config: Says both.
        began: When the training began, by the monotonic clock.

    Attributes:
        restarts: How often it has gone on.
    """

    def __init__(self, run_config: RunConfig, began: float) -> None:
        self.restarts = 0
        self._most = run_config.max_restarts
        self._deadline = None if run_config.timeout is None else began + run_config.timeout

    def left(self, otherwise: float) -> float:
        """Seconds that are left; `otherwise` where there is no limit."""
        return otherwise if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def timeout(self) -> float | None:
        """Seconds that are left; None where there is no limit."""
        return None if self._deadline is None else self.left(0.0)

    def run(self, attempt: Callable[[], _T], *, checkpoint: Callable[[], str], shrink: Callable[[], str | None]) -> _T:
        """Attempts it until it succeeds, or fails for another reason than a loss.

        Args:
            attempt: The training, from its last checkpoint to its end.
            checkpoint: Where the next attempt goes on from, in words.
            shrink: Lets the next attempt be of fewer workers if that is allowed and they are what there is; returns
                their number in words, None if it did not.

        Raises:
            WorkerLostError: If workers were lost more often than is allowed.
            CapacityError: If there is no room for the gang, or none in time.
        """
        lost_at: float | None = None
        while True:
            try:
                return attempt()
            except WorkerLostError as error:
                if self.restarts >= self._most:
                    raise
                self.restarts += 1
                lost_at = time.monotonic()
                say(f"{error}: going on from {checkpoint()} (restart {self.restarts} of {self._most})")
            except CapacityError:
                # A node that is lost is replaced while the pool's demand lives: it takes its time to be seen dead, and
                # another to start.
                waited = None if lost_at is None else time.monotonic() - lost_at
                if waited is None or waited > WAIT_SECONDS or self.left(1.0) == 0.0:
                    raise
                if waited > _REPLACE_SECONDS and (fewer := shrink()):
                    say(f"no other node came within {_REPLACE_SECONDS:.0f} s: going on with {fewer}")
                time.sleep(_PATIENCE_SECONDS)
