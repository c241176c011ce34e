"""Base class of operators on a compute pool.

`PoolOperator` finds the pool and the lease that the operator's arguments name. If Airflow kills the task, the operator
can undo its work before the task ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowException

from shoal.airflow._run_holder import holder_of
from shoal.airflow.base.checked import CheckedOperator
from shoal.airflow.checks import Arguments, check_pool
from shoal.airflow.hooks import ComputePoolHook

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.pool.status import PoolStatus


class TaskKilledError(AirflowException):
    """Raised in a task that Airflow ends, because the task was cleared or marked as success or failed, its DAG run was
    deleted, or its worker was shut down."""


class PoolOperator(CheckedOperator):
    """Base class of operators on a compute pool.

    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool`` that defines the pool. Pass at most one of
        `compute_pool_conn_id` and `pool_name`. (templated)
    :param lease: Id of the task that leases the nodes. In a DAG with several leases, this argument selects the lease
        that the task uses. ``pool_for_run`` sets the argument for the tasks of its block.
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

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check that the arguments select the pool only once, by a correct name or URI, as far as the arguments are
        known."""
        check_pool(arguments)

    @property
    def hook(self) -> ComputePoolHook:
        """Return a hook for the pool that the operator's arguments select."""
        return ComputePoolHook(self.compute_pool_conn_id, self.pool_name)

    def holder_in(self, context: Context) -> str:
        """Return the name of the holder to which this task's lease and jobs belong (see `holder_of`).

        :param context: Airflow's context of the task.
        """
        return holder_of(context, self.lease)

    def on_kill(self) -> None:
        """Set a flag, so that `execute` rolls back its work and ends. Airflow allows 5 seconds for the rollback."""
        # Airflow calls this method in a signal handler, possibly in the middle of a transaction. An exception from this
        # method would leave the store locked. So this method only sets a flag. `execute` checks the flag at points
        # where `execute` can safely end.
        self._killed = True

    @property
    def is_killed(self) -> bool:
        """Return whether Airflow has called `on_kill`."""
        return self._killed

    def end_if_killed(self) -> None:
        """Raise TaskKilledError if Airflow has called `on_kill`.

        Call this method only where an exception cannot interrupt unfinished work, such as a transaction.
        """
        if self._killed:
            raise TaskKilledError(
                f"Airflow has ended task {self.task_id}: the task was cleared or marked as success or failed, its DAG "
                "run was deleted, or its worker was shut down"
            )

    def log_progress(self, status: PoolStatus, holder: str | None = None) -> None:
        """Log the progress of the pool if the progress has changed. Raise TaskKilledError if Airflow has killed the
        task.

        Operators pass this method as `on_progress` to the pool's methods that wait for nodes.

        :param status: Current status of the pool.
        :param holder: Name of the holder whose lease the task waits for. If this lease is in the queue, the lease's
            place is logged, too.
        """
        self.end_if_killed()
        text = f"pool {status.name}: {status.progress(holder)}"
        if text != self._last_logged:
            self.log.info(text)
        self._last_logged = text
