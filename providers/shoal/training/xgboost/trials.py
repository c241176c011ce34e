"""Train the trials of a search with XGBoost in one worker, on matrices that are built once.

Only workers import this module, because it imports XGBoost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import xgboost

from shoal.training.boosting.messages import Boosted, Segment, Task
from shoal.training.boosting.trials import OnRound
from shoal.training.reporting import GangContext
from shoal.training.xgboost.worker import Session, own_errors

_MOST_SESSIONS = 2
"""Number of values of ``max_bin`` whose matrices are kept. A search that varies it reads the rows again now and then,
instead of keeping as many copies of them."""


class Trials:
    """Sessions of this worker, each with the matrices of one ``max_bin``.

    Args:
        context: Context of a worker that trains alone.
    """

    def __init__(self, context: GangContext) -> None:
        self._context = context
        self._sessions: dict[Any, Session] = {}

    def boost(self, task: Task, on_round: OnRound) -> Callable[[Segment], Boosted]:
        """Begin a training, and return the function that trains a segment of it."""
        callbacks = (*task.user_code.callbacks, _Rounds(on_round))
        task = replace(task, user_code=replace(task.user_code, callbacks=callbacks))
        key = (task.params.get("max_bin"), str(task.params.get("device", "cpu")))
        with own_errors():
            session = self._sessions.pop(key, None)
            if session is None:
                while len(self._sessions) >= _MOST_SESSIONS:
                    self._sessions.pop(next(iter(self._sessions))).close()
                session = Session(task, self._context)
            else:
                session.begin_again(task)
            self._sessions[key] = session  # the newest is the last

        def boost(segment: Segment) -> Boosted:
            with own_errors():
                return session.boost(segment)

        return boost


class _Rounds(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Callback that passes the metrics of each round on.

    Args:
        on_round: Function that gets the round and the metrics.
    """

    def __init__(self, on_round: OnRound) -> None:
        self._on_round = on_round

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        """Pass the metrics on; the function may raise an error to end the training."""
        self._on_round(epoch, evals_log)
        return False
