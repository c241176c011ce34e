"""Base class of shoal's operators: the arguments that select pool and lease, and the handling of a killed task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from shoal.airflow.hooks import ComputePoolHook, holder_of
from shoal.pool.status import PoolStatus

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class TaskKilledError(AirflowException):
    """Error of a task that Airflow ends: the task was marked or cleared, its run deleted, or its worker shut down."""


class PoolOperator(BaseOperator):
    """Base class of operators on a compute pool.

    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param lease: Id of the task that leases the nodes, for a DAG with several leases. ``pool_for_run`` sets it for the
        tasks of its block.
    """

    template_fields: Sequence[str] = ("pool_name", "compute_pool_conn_id")
    ui_color = "#d9ecf2"

    def __init__(
        self,
        *,
        pool_name: str | None = None,
        compute_pool_conn_id: str | None = None,
        lease: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pool_name = pool_name
        self.compute_pool_conn_id = compute_pool_conn_id
        self.lease = lease
        self._killed = False
        self._last_logged = ""

    @property
    def hook(self) -> ComputePoolHook:
        """Return a hook for the pool."""
        return ComputePoolHook(self.compute_pool_conn_id, self.pool_name)

    def holder_in(self, context: Context) -> str:
        """Return the holder of this task's lease and jobs.

        :param context: Airflow's context of the task.
        """
        return holder_of(context, self.lease)

    def on_kill(self) -> None:
        """Request that `execute` rolls back and ends; Airflow allows 5 seconds for this."""
        # Airflow calls this method in a signal handler, possibly in the middle of a transaction. An exception raised
        # here would leave the store locked. `execute` checks the flag only where it can safely end.
        self._killed = True

    def end_if_killed(self) -> None:
        """Raise TaskKilledError if Airflow has called `on_kill`. Call this only where no work is half done."""
        if self._killed:
            raise TaskKilledError(
                f"task {self.task_id} was ended from outside: it was marked or cleared, its run was deleted, or its "
                "worker shut down"
            )

    def look(self, status: PoolStatus, holder: str | None = None) -> None:
        """Log each change of the pool, and end a killed task; used as `on_progress` of the pool's methods.

        :param status: Current status of the pool.
        :param holder: Holder whose lease the task waits for; its place in the queue is logged, too.
        """
        self.end_if_killed()
        text = f"pool {status.name}: {len(status.active)} of {status.target} nodes ready"
        if note := status.queue_note(holder):
            text += f"; the lease is {note}"
        if text != self._last_logged:
            self.log.info(text)
        self._last_logged = text
