"""Things that go wrong in a worker at a chosen point; workers import this by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from shoal.training.context import get_context


class Sabotage:
    """Calls a function of `xgboost.worker`, but one rank does something to itself at a stage.

    Args:
        rank: Whose worker.
        stage: "import" (before anything else), "matrix" (at its second row group) or "round" (after round 3).
        deed: "kill", "raise" or "hang".
        reached: File that it makes when it has come so far.
    """

    def __init__(self, rank: int, stage: str, deed: str, reached: Path) -> None:
        self.rank = rank
        self.stage = stage
        self.deed = deed
        self.reached = reached

    def __call__(self, name: str, *args: Any) -> Any:
        mine = get_context().rank == self.rank and name == "prepare"
        if mine and self.stage == "import":
            self.act()
        from shoal.training.rows import ShardRows
        from shoal.training.xgboost import worker as xgboost_worker

        if mine and self.stage == "matrix":
            batch = ShardRows._batch
            seen = []

            def second_fails(shard: Any, *args: Any) -> Any:
                seen.append(args)
                if len(seen) == 2:
                    self.act()
                return batch(shard, *args)

            ShardRows._batch = second_fails
        if mine and self.stage == "round":
            import xgboost

            class After(xgboost.callback.TrainingCallback):
                def after_iteration(callback, model: Any, epoch: int, evals_log: Any) -> bool:
                    if epoch == 3:
                        self.act()
                    return False

            object.__setattr__(args[0], "callbacks", (After(),))
        return getattr(xgboost_worker, name)(*args)

    def act(self) -> None:
        self.reached.touch()
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed == "raise":
            raise ValueError("boom")
        threading.Event().wait()
