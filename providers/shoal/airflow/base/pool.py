"""Base class of operators on a compute pool.

`PoolOperator` finds the pool and the lease that the operator's arguments name. If Airflow kills the task, the operator
can undo its work before the task ends.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException

from shoal.airflow._run_holder import holder_of, is_single_task_test, team_of
from shoal.airflow.base.checked import CheckedOperator
from shoal.airflow.checks import Arguments, check_pool, check_waits
from shoal.airflow.hooks import ComputePoolHook
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.pool.api import ComputePool
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
        self.is_killed = False
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

    def pool_in(self, context: Context, hook: ComputePoolHook | None = None) -> ComputePool:
        """Return a client of the pool, for the holder and the team of this task.

        :param context: Airflow's context of the task.
        :param hook: Hook of the pool. By default, a new one, which reads the connection from Airflow.
        """
        hook = hook or self.hook
        return hook.pool(self.holder_in(context), team=team_of(context, hook.team, self.owner))

    def setup_advice(self, context: Context) -> str:
        """Return advice for an error about a pool on which the DAG run has no nodes any more: which task leases them.
        If only this task is cleared, that task does not run again.

        :param context: Airflow's context of the task.
        """
        run = context["dag_run"]
        if is_single_task_test(context):
            return (
                f"`airflow tasks test` does not run the task {self.lease}, which leases the nodes: first start the "
                f"pool with `shoal pool up`, or run the whole DAG with `airflow dags test {run.dag_id}`"
            )
        return (
            f"In this run, the task {self.lease} leases the nodes: clear it, too. `shoal train-again {run.dag_id} "
            f"{run.run_id}` clears all that is needed to train again what failed"
        )

    def pre_execute(self, context: Context) -> None:
        """Record the web address of this Airflow in shoal's store, and warn if another Airflow has the same id. Airflow
        calls this method before `execute`.

        :param context: Airflow's context of the task.
        """
        from shoal.airflow.deployment import warn_of_copies

        # `execute` needs the store and the id, too, and raises the error.
        with suppress(ShoalError):
            warn_of_copies()

    def on_kill(self) -> None:
        """Set a flag, so that `execute` rolls back its work and ends. Airflow allows 5 seconds for the rollback."""
        # Airflow calls this method in a signal handler, possibly in the middle of a transaction. An exception from this
        # method would leave the store locked. So this method only sets a flag. `execute` checks the flag at points
        # where `execute` can safely end.
        self.is_killed = True

    def end_if_killed(self) -> None:
        """Raise TaskKilledError if Airflow has called `on_kill`.

        Call this method only where an exception cannot interrupt unfinished work, such as a transaction.
        """
        if self.is_killed:
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


POLL_INTERVAL_S = 5.0
"""Default of `poll_interval`. The trigger notices the end of a wait after at most `poll_interval` seconds. Airflow then
needs more than 5 s to start the process in which the deferred task continues."""

_OPERATION_GRACE_S = 60.0
"""Seconds after the deadline of a request for nodes, after which a deferred task continues even if the request is still
open. Normally the reconciler on the pool's host ends a request at its deadline."""


def is_deferrable(given: bool | None) -> bool:
    """Return an operator's argument `deferrable` or, if it is None, Airflow's setting ``[operators]
    default_deferrable``.

    :param given: The operator's argument `deferrable`.
    """
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False)) if given is None else given


def deadline_of_operation(rollback_after_s: float) -> float:
    """Return the time until which a deferred task waits for a request for nodes: the deadline of the request, plus a
    grace period.

    :param rollback_after_s: Seconds until the deadline of the request.
    :returns: Seconds since the epoch.
    """
    return time.time() + rollback_after_s + _OPERATION_GRACE_S


class WorkerLostError(AirflowException):
    """Raised in a task whose worker was killed. The job goes on, and Airflow's next try of the task attaches to the
    job."""


def end_if_worker_is_lost() -> None:
    """Raise WorkerLostError if the worker's process that supervises this task was killed.

    The task's own process survives the loss of its worker, but can no longer send a result to Airflow.
    """
    from airflow.sdk.execution_time import task_runner

    # In `dag.test()`, there is no supervising process, and so no connection to one.
    connection = getattr(getattr(task_runner, "SUPERVISOR_COMMS", None), "socket", None)
    if connection is None:
        return
    try:
        is_lost = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        is_lost = False
    except OSError:
        is_lost = True
    if is_lost:
        raise WorkerLostError(
            "the task's worker was killed: the job goes on, and Airflow's next try of the task attaches to the job"
        )


class WaitingOperator(PoolOperator):
    """Base class of operators that wait.

    :param deferrable: Whether the task waits in Airflow's triggerer, where it takes no slot of a worker. By default,
        Airflow's setting ``[operators] default_deferrable`` decides.
    :param poll_interval: Seconds between two checks of the store while the task is deferred.
    :param wait_for_completion: Whether the task waits. False: the task ends when its request or job is submitted.
    """

    def __init__(
        self,
        *,
        deferrable: bool | None = None,
        poll_interval: float = POLL_INTERVAL_S,
        wait_for_completion: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deferrable = is_deferrable(deferrable)
        self.poll_interval = poll_interval
        self.wait_for_completion = wait_for_completion

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, and how the task waits."""
        super().check_arguments(arguments)
        check_waits(arguments)
