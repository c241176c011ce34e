"""What a job's work has around it, on its pool's head."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from shoal.jobs.files import artifacts
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.retries import patiently
from shoal.jobs.mlflow.tracking import Run
from shoal.state import Store
from shoal.training.claims import Claim


@dataclass(frozen=True)
class Workplace:
    """One attempt's surroundings.

    Attributes:
        store: Where its row is.
        key: Which attempt it is.
        run: Its run in MLflow; None: it is not tracked.
        tags: What tells whose run it is.
        environment: What the workers need beside the data, handed to them as actor arguments.
        begun: When it began, by the monotonic clock.
    """

    store: Store
    key: Key
    run: Run | None
    tags: dict[str, str]
    environment: dict[str, str] = field(repr=False)
    begun: float = field(default_factory=time.monotonic)

    def claim(self) -> Claim:
        """What marks this attempt's folders as its own."""
        return artifacts.claim_of(self.store, self.key)

    def is_current(self) -> bool:
        """Whether this attempt runs, and none is newer; a store that is away is waited for."""
        return patiently(self.store, lambda: attempts.is_current(self.store, self.key))
