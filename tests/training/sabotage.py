"""Things that go wrong in a worker at a chosen point; workers import this by name."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

from shoal.boosting_libraries import Framework
from shoal.training.boosting.params import UserCode
from shoal.training.reporting import gang_context

FIRST = {"xgboost": "prepare", "lightgbm": "begin"}
"""What is called first on the workers, and reads their rows."""


class Sabotage:
    """Calls a function of a library's worker, but one rank does something to itself at a stage.

    Args:
        framework: The library.
        rank: Whose worker.
        stage: "import" (before anything else), "matrix" (at its second row group) or "round" (after round 3).
        deed: "kill", "raise" or "hang".
        reached: File that it makes when it has come so far.
    """

    def __init__(self, framework: Framework, rank: int, stage: str, deed: str, reached: Path) -> None:
        self.framework = framework
        self.rank = rank
        self.stage = stage
        self.deed = deed
        self.reached = reached

    def __call__(self, name: str, *args: Any) -> Any:
        mine = gang_context().rank == self.rank and name == FIRST[self.framework]
        if mine and self.stage == "import":
            self.act()
        from shoal.training.boosting.rows import ShardRows

        worker = importlib.import_module(f"shoal.training.{self.framework}.worker")
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
            object.__setattr__(args[0], "user_code", UserCode(callbacks=(self._after_round_3(),)))
        return getattr(worker, name)(*args)

    def _after_round_3(self) -> Any:
        if self.framework == "lightgbm":
            return lambda env: self.act() if env.iteration == 3 else None
        import xgboost

        class After(xgboost.callback.TrainingCallback):
            def after_iteration(callback, model: Any, epoch: int, evals_log: Any) -> bool:
                if epoch == 3:
                    self.act()
                return False

        return After()

    def act(self) -> None:
        self.reached.touch()
        if self.deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.deed == "raise":
            raise ValueError("boom")
        threading.Event().wait()
