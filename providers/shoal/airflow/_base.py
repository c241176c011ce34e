"""What shoal's operators share: a pool, and an end on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from shoal.airflow.hooks import ComputePoolHook
from shoal.pool.status import PoolStatus


class TaskKilledError(AirflowException):
    """The task was ended from outside: marked, cleared, its run deleted, or its worker shut down."""


class PoolOperator(BaseOperator):
    """An operator on a compute pool.

    :param pool_name: Name of a pool, or its URI (``local://retrain?max_nodes=4``). (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    """

    template_fields: Sequence[str] = ("pool_name", "compute_pool_conn_id")
    ui_color = "#d9ecf2"

    def __init__(self, *, pool_name: str | None = None, compute_pool_conn_id: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pool_name = pool_name
        self.compute_pool_conn_id = compute_pool_conn_id
        self._killed = False
        self._said = ""

    @property
    def hook(self) -> ComputePoolHook:
        """The pool's hook."""
        return ComputePoolHook(self.compute_pool_conn_id, self.pool_name)

    def on_kill(self) -> None:
        """Have `execute` undo what it began; Airflow leaves it 5 seconds."""
        # Airflow calls this in a signal handler, perhaps in the middle of a transaction: an exception out of here would
        # leave the store locked. `execute` looks at the flag where it may end.
        self._killed = True

    def end_if_killed(self) -> None:
        """Raise where `on_kill` was called; called where nothing is half done."""
        if self._killed:
            raise TaskKilledError(f"task {self.task_id} was ended from outside")

    def look(self, status: PoolStatus) -> None:
        """The `on_progress` of the pool's calls: log each change, and end on demand.

        :param status: The pool as it stands.
        """
        self.end_if_killed()
        text = f"pool {status.name}: {len(status.active)} of {status.target} nodes ready"
        if text != self._said:
            self.log.info(text)
        self._said = text
