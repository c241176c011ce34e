"""Provide the base classes of shoal's Airflow operators.

`CheckedOperator` checks arguments while Airflow loads the DAG. `PoolOperator` finds the pool and the lease that the
operator's arguments name. If Airflow kills the task, the operator can undo its work before the task ends.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, get_current_context
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from shoal.airflow._holder import holder_of
from shoal.airflow.checks import Arguments, check_pool
from shoal.airflow.hooks import ComputePoolHook
from shoal.errors import InvalidArgumentError
from shoal.pool.status import PoolStatus

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context
    from airflow.sdk.definitions.mappedoperator import OperatorPartial


class TaskKilledError(AirflowException):
    """Raised in a task that Airflow ends, because the task was cleared or marked as success or failed, its DAG run was
    deleted, or its worker was shut down."""


class CheckedOperator(BaseOperator):
    """Base class of operators whose arguments are checked while Airflow loads the DAG, as far as they are known then.

    The constructor of a subclass calls `check` when it has set all attributes.
    """

    @classmethod
    @abstractmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known.

        :param arguments: Arguments of the constructor.
        :raises InvalidArgumentError: An argument is wrong.
        """

    @classmethod
    def check(cls, task_id: str, arguments: Mapping[str, Any]) -> None:
        """Check those arguments of a task that are known.

        :param task_id: Id of the task, for the message.
        :param arguments: Arguments of the constructor. Those that are missing are not known yet.
        :raises InvalidArgumentError: An argument is wrong.
        :raises AirflowFailException: The same, in a task: Airflow creates the instances of a mapped task only there.
        """
        in_task = _is_in_task()
        try:
            cls.check_arguments(Arguments(arguments, in_task=in_task))
        except InvalidArgumentError as error:
            message = f"task {task_id}: {error}"
            if in_task:
                raise AirflowFailException(message) from error
            raise InvalidArgumentError(message) from None

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, and return Airflow's object for them.

        :param task_id: Id of the task.
        :param kwargs: Arguments that the instances have in common.
        """
        cls.check(task_id, kwargs)
        return super().partial(task_id=task_id, **kwargs)


def _is_in_task() -> bool:
    try:
        get_current_context()
    except RuntimeError:
        return False
    return True


class PoolOperator(CheckedOperator):
    """Base class of operators on a compute pool.

    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool`` that defines the pool. Give this or
        `pool_name`, but not both. (templated)
    :param lease: Id of the task that leases the nodes. A DAG with several leases needs it to know which lease a task
        uses. ``pool_for_run`` sets it for the tasks of its block.
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
        """Check those arguments that are known: that the pool is named once, by a correct name or URI."""
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
        """Set a flag, so that `execute` rolls back its work and ends. Airflow allows 5 seconds for this."""
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

        Call this method only at points where an exception leaves no work half done, such as a transaction.
        """
        if self._killed:
            raise TaskKilledError(
                f"Airflow has ended task {self.task_id}: the task was cleared or marked as success or failed, its DAG "
                "run was deleted, or its worker was shut down"
            )

    def look(self, status: PoolStatus, holder: str | None = None) -> None:
        """Log the number of active nodes if it has changed. If Airflow has killed the task, end it with an error.

        Operators pass this method as `on_progress` to the methods of the pool that wait.

        :param status: Current status of the pool.
        :param holder: Name of the holder whose lease the task waits for. If this lease is in the queue, its place is
            logged, too.
        """
        self.end_if_killed()
        text = f"pool {status.name}: {status.progress(holder)}"
        if text != self._last_logged:
            self.log.info(text)
        self._last_logged = text
